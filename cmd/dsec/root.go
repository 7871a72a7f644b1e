package main

import (
	"errors"
	"fmt"
	"os"
	"slices"

	"github.com/spf13/cobra"

	"github.com/opendsec/dsec/cmd/dsec/daemon"
	"github.com/opendsec/dsec/cmd/dsec/user"
	"github.com/opendsec/dsec/internal/version"
)

// verbs of the machine; those of users are in package user.
var verbs = []func() *cobra.Command{
	daemon.Up, daemon.Down, daemon.Doctor, daemon.Bench, daemon.Gateway, daemon.Node,
}

func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:           "dsec",
		Short:         "Computers for agents to work in",
		Version:       version.Version,
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	user.Register(root)
	for _, v := range slices.Concat(user.Verbs, verbs) {
		root.AddCommand(v())
	}
	return root
}

// finish prints an error that nobody has printed and returns the exit code.
func finish(err error) int {
	if code, ok := errors.AsType[user.ExitCode](err); ok {
		return int(code)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "dsec:", err)
		return 1
	}
	return 0
}

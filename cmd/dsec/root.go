package main

import (
	"errors"

	"github.com/spf13/cobra"

	"github.com/opendsec/dsec/cmd/dsec/daemon"
	"github.com/opendsec/dsec/internal/version"
)

// verbs of the command line, in the order in which help shows them.
var verbs = []func() *cobra.Command{
	daemon.Up, daemon.Down, daemon.Gateway, daemon.Node, daemon.Bench,
}

func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:           "dsec",
		Short:         "Computers for agents to work in",
		Version:       version.Version,
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	for _, v := range verbs {
		root.AddCommand(v())
	}
	return root
}

// status is an exit code that a verb asks for; its text has been printed.
type status int

func (s status) Error() string { return "" }

func exitCode(err error) int {
	if s, ok := errors.AsType[status](err); ok {
		return int(s)
	}
	if err != nil {
		return 1
	}
	return 0
}

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
		Example:       "  dsec run debian:12 -- echo hello",
		Version:       version.Version,
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	user.Register(root)
	for _, v := range slices.Concat(user.Verbs, verbs) {
		root.AddCommand(v())
	}
	root.SetFlagErrorFunc(func(c *cobra.Command, err error) error { return wrongUsage{c, err} })
	checkArgs(root)
	return root
}

// checkArgs makes wrong arguments of any verb a wrongUsage.
func checkArgs(c *cobra.Command) {
	if args := c.Args; args != nil {
		c.Args = func(c *cobra.Command, given []string) error {
			if err := args(c, given); err != nil {
				return wrongUsage{c, err}
			}
			return nil
		}
	}
	for _, sub := range c.Commands() {
		checkArgs(sub)
	}
}

// wrongUsage is an error of who typed the command line.
type wrongUsage struct {
	c   *cobra.Command
	err error
}

func (w wrongUsage) Error() string {
	return w.err.Error() + "\nusage: " + w.c.UseLine() + "\nsee: " + w.c.CommandPath() + " --help"
}

func (w wrongUsage) Unwrap() error { return w.err }

// finish prints an error that nobody has printed and returns the exit code.
func finish(err error) int {
	if code, ok := errors.AsType[user.ExitCode](err); ok {
		return int(code)
	}
	if err == nil {
		return 0
	}
	fmt.Fprintln(os.Stderr, "dsec:", err)
	if w, ok := errors.AsType[wrongUsage](err); ok {
		return user.UsageCode(w.c)
	}
	return 1
}

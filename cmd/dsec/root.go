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
	daemon.Up, daemon.Down, daemon.Doctor, daemon.Bench, daemon.Gateway, daemon.Loader, daemon.Packages, daemon.Egress, daemon.Node,
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
		c := v()
		if c.Name() == "layer" { // the rest of the group asks a gateway
			c.AddCommand(daemon.LayerGC(), daemon.LayerVerify())
		}
		root.AddCommand(c)
	}
	root.SetFlagErrorFunc(func(c *cobra.Command, err error) error { return wrongUsage{c, err} })
	checkArgs(root)
	checkGroups(root)
	return root
}

// checkGroups makes a word that is no command of a group a wrongUsage, where
// cobra would show the help and be content.
func checkGroups(c *cobra.Command) {
	if c.HasSubCommands() && !c.Runnable() {
		c.Args, c.SuggestionsMinimumDistance = cobra.ArbitraryArgs, 2
		c.RunE = func(c *cobra.Command, given []string) error {
			if len(given) == 0 {
				return c.Help()
			}
			err := fmt.Errorf("unknown command %q", given[0])
			if near := c.SuggestionsFor(given[0]); len(near) > 0 {
				err = fmt.Errorf("%w, did you mean %q?", err, near[0])
			}
			return wrongUsage{c, err}
		}
	}
	for _, sub := range c.Commands() {
		checkGroups(sub)
	}
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
	use := w.c.UseLine()
	if w.c.HasSubCommands() {
		use = w.c.CommandPath() + " COMMAND"
	}
	return w.err.Error() + "\nusage: " + use + "\nsee: " + w.c.CommandPath() + " --help"
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
	fmt.Fprintln(os.Stderr, "dsec:", user.ErrorText(err))
	if advice := user.Advice(err); advice != "" {
		fmt.Fprintln(os.Stderr, "dsec:", advice)
	}
	if w, ok := errors.AsType[wrongUsage](err); ok {
		return user.UsageCode(w.c)
	}
	return 1
}

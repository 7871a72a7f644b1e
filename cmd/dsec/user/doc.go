// Package user is the part of the command line that talks to a gateway over
// the Go client: one verb, one file, each a function that returns its command.
//
// Every verb that prints takes -o json and then prints one JSON value (one per
// line where it goes on printing), sizes in bytes and durations in seconds. A
// table or plain lines are for people; bars are drawn on a terminal only.
// Errors read "operation object: cause" and go to stderr. An error that is an
// ExitCode has been printed.
package user

import "github.com/spf13/cobra"

// Verbs in the order in which help shows them.
var Verbs = []func() *cobra.Command{
	Run, Call, Create, PS, Exec, Logs, CP, PortForward, Stop, Start, Pause, Resume, Fork, Checkpoint, Restore, RM, Commit, Grade, Network, Phase, Screen, Mark, Revert, Diff, Debug, Image, Layer, Template, Stat, Events, Audit, Findings, Why, Profile, Keys, Context,
}

// ExitCode is what the process ends with; its reason has been printed.
type ExitCode int

// Exit codes besides those of commands, as docker has them.
const (
	exitDsec      ExitCode = 125 // dsec itself could not
	exitCannotRun ExitCode = 126 // the command is there but cannot be run
	exitNotFound  ExitCode = 127 // the command is not there
	exitTimeout   ExitCode = 124 // --timeout has passed
)

func (e ExitCode) Error() string { return "" }

// UsageCode is the exit code of a verb that was used wrongly: run, exec and debug keep
// the small numbers for commands.
func UsageCode(c *cobra.Command) int {
	if n := c.Name(); n == "run" || n == "exec" || n == "debug" {
		return int(exitDsec)
	}
	return 2
}

// Register adds the flags that all verbs understand to the root.
func Register(root *cobra.Command) {
	f := root.PersistentFlags()
	f.String("context", "", "gateway to talk to, as \"dsec context ls\" names it")
	f.StringP("output", "o", "table", "table or json")
	_ = root.RegisterFlagCompletionFunc("context", completeContexts) // the flag was made above
	_ = root.RegisterFlagCompletionFunc("output", cobra.FixedCompletions([]string{"table", "json"}, cobra.ShellCompDirectiveNoFileComp))
}

package user

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
)

// Stop is the verb that ends the processes of sandboxes.
func Stop() *cobra.Command {
	var cause string
	c := &cobra.Command{
		Use:               "stop SANDBOX...",
		Short:             "End the processes of sandboxes and keep the disks",
		Example:           "  dsec stop work\n  dsec stop --cause agent_error work",
		Args:              cobra.MinimumNArgs(1),
		ValidArgsFunction: completeSandboxes(0),
		RunE: func(c *cobra.Command, args []string) error {
			return forEach(c, args, func(ctx context.Context, cl *client.Client, id dsec.SandboxID) (any, error) {
				return cl.Stop(ctx, id, dsec.Cause(cause))
			})
		},
	}
	c.Flags().StringVar(&cause, "cause", "", "verdict of the owner: completed, cancelled, agent_error, agent_timeout, agent_damage, task_…, grader_… (default completed)")
	var names []string
	for _, x := range dsec.Causes {
		if !x.Infra() {
			names = append(names, string(x))
		}
	}
	_ = c.RegisterFlagCompletionFunc("cause", cobra.FixedCompletions(names, cobra.ShellCompDirectiveNoFileComp)) // the flag was made above
	return c
}

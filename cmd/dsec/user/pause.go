package user

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
)

// Pause is the verb that freezes sandboxes.
func Pause() *cobra.Command {
	var toDisk bool
	c := &cobra.Command{
		Use:   "pause SANDBOX...",
		Short: "Freeze sandboxes",
		Long: `Freezes everything that runs in sandboxes; the clocks of their commands stop. A command
that is started in one, or a connection to a port, has it go on.

With --to-disk what one has in memory is written to disk and taken out of memory. Only tiers
with a kernel of their own can: microvm.`,
		Example:           "  dsec pause work\n  dsec pause --to-disk work",
		Args:              cobra.MinimumNArgs(1),
		ValidArgsFunction: completeSandboxes(0),
		RunE: func(c *cobra.Command, args []string) error {
			return forEach(c, args, func(ctx context.Context, cl *client.Client, id dsec.SandboxID) (any, error) {
				if toDisk {
					return cl.Suspend(ctx, id)
				}
				return cl.Pause(ctx, id)
			})
		},
	}
	c.Flags().BoolVar(&toDisk, "to-disk", false, "have what it has in memory be on disk only")
	return c
}

// Resume is the verb that has paused sandboxes go on.
func Resume() *cobra.Command {
	return &cobra.Command{
		Use:               "resume SANDBOX...",
		Short:             "Have paused sandboxes go on",
		Example:           "  dsec resume work",
		Args:              cobra.MinimumNArgs(1),
		ValidArgsFunction: completeSandboxes(0),
		RunE: func(c *cobra.Command, args []string) error {
			return forEach(c, args, func(ctx context.Context, cl *client.Client, id dsec.SandboxID) (any, error) {
				return cl.Resume(ctx, id)
			})
		},
	}
}

package user

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
)

// Start is the verb that runs stopped sandboxes again.
func Start() *cobra.Command {
	return &cobra.Command{
		Use:               "start SANDBOX...",
		Short:             "Run stopped sandboxes again, on the same disks",
		Example:           "  dsec start work",
		Args:              cobra.MinimumNArgs(1),
		ValidArgsFunction: completeSandboxes(0),
		RunE: func(c *cobra.Command, args []string) error {
			return forEach(c, args, func(ctx context.Context, cl *client.Client, id dsec.SandboxID) (any, error) {
				return cl.Start(ctx, id)
			})
		},
	}
}

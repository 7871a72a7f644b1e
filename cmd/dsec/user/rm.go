package user

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
)

// removed is what rm prints as JSON.
type removed struct {
	ID      string `json:"id"`
	Existed bool   `json:"existed"`
}

// RM is the verb that deletes sandboxes.
func RM() *cobra.Command {
	return &cobra.Command{
		Use:               "rm SANDBOX...",
		Short:             "Delete sandboxes, running ones too; only their records stay",
		Example:           "  dsec rm work\n  dsec rm $(dsec ps -q --label batch=7)",
		Args:              cobra.MinimumNArgs(1),
		ValidArgsFunction: completeSandboxes(0),
		RunE: func(c *cobra.Command, args []string) error {
			return forEach(c, args, func(ctx context.Context, cl *client.Client, id dsec.SandboxID) (any, error) {
				existed, err := cl.Delete(ctx, id)
				return removed{string(id), existed}, err
			})
		},
	}
}

package user

import (
	"context"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
)

// Fork is the verb that copies a sandbox with what runs in it.
func Fork() *cobra.Command {
	var count int
	c := &cobra.Command{
		Use:   "fork SANDBOX",
		Short: "Make copies of a sandbox, with memory and disk",
		Long: `Makes copies of a running sandbox, which goes on: its processes with their memory, and
its disk, as they are at one moment. Host name, machine id, addresses, the clock and the
kernel's random numbers of each are its own; a random generator in the memory of a
program is copied as it is. All copies are made, or none. Prints their ids.

Only tiers with a kernel of their own can be copied: microvm.`,
		Example:           "  dsec fork work\n  dsec fork work --count 8 -o json",
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: completeSandboxes(1),
		RunE: func(c *cobra.Command, args []string) error {
			if count < 1 {
				return usage("fork sandbox", fmt.Sprintf("--count wants 1 to %d", dsec.MaxForks))
			}
			return with(c, func(ctx context.Context, cl *client.Client) error {
				id, err := find(ctx, cl, args[0])
				if err != nil {
					return err
				}
				all, err := cl.Fork(ctx, id, count)
				if err != nil {
					return err
				}
				return show(c, all, func(w io.Writer) error {
					for _, sb := range all {
						if _, err := fmt.Fprintln(w, sb.ID); err != nil {
							return err
						}
					}
					return nil
				})
			})
		},
	}
	c.Flags().IntVar(&count, "count", 1, "how many, up to 1,000")
	return c
}

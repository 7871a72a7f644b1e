package user

import (
	"context"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
)

// Diff is the verb that lists what a sandbox changed.
func Diff() *cobra.Command {
	var most int
	c := &cobra.Command{
		Use:   "diff SANDBOX",
		Short: "List what a sandbox changed",
		Long: `A: added, M: modified, D: deleted, with the size now and the size before. It works on a
sandbox that runs or is stopped, and on one that failed and whose disk is kept. Whether a
file was modified is told by its size, time, owner and mode.`,
		Example:           "  dsec diff work\n  dsec diff work -o json",
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: completeSandboxes(1),
		RunE: func(c *cobra.Command, args []string) error {
			return with(c, func(ctx context.Context, cl *client.Client) error {
				id, err := find(ctx, cl, args[0])
				if err != nil {
					return err
				}
				d, err := cl.Changes(ctx, id, most)
				if err != nil {
					return err
				}
				return show(c, d, func(w io.Writer) error { return showChanges(w, d) })
			})
		},
	}
	c.Flags().IntVar(&most, "most", 0, "list at most so many (default 100000)")
	return c
}

func showChanges(w io.Writer, d dsec.Changes) error {
	for _, c := range d.List {
		line := fmt.Sprintf("%s %s", c.Kind, safe(c.Path))
		switch {
		case c.Kind == dsec.Modified && c.Size+c.Was > 0:
			line += fmt.Sprintf("  %s, was %s", size(c.Size), size(c.Was))
		case c.Size > 0:
			line += "  " + size(c.Size)
		}
		if _, err := fmt.Fprintln(w, line); err != nil {
			return err
		}
	}
	if d.Cut {
		_, err := fmt.Fprintf(w, "… of %d added, %d modified, %d deleted\n", d.Added, d.Modified, d.Deleted)
		return err
	}
	return nil
}

package user

import (
	"context"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/opendsec/dsec/client"
)

// committed is what commit prints as JSON.
type committed struct {
	Digest string `json:"digest"`
	Tag    string `json:"tag"`
}

// Commit is the verb that makes a layer of a sandbox's disk.
func Commit() *cobra.Command {
	return &cobra.Command{
		Use:               "commit SANDBOX TAG",
		Short:             "Stop a sandbox and make a layer of what it wrote",
		Example:           "  dsec commit work repo:patched\n  dsec create debian:12 --layer repo:v1 --layer repo:patched",
		Args:              cobra.ExactArgs(2),
		ValidArgsFunction: completeSandboxes(1),
		RunE: func(c *cobra.Command, args []string) error {
			return with(c, func(ctx context.Context, cl *client.Client) error {
				id, err := find(ctx, cl, args[0])
				if err != nil {
					return err
				}
				digest, err := cl.Commit(ctx, id, args[1])
				if err != nil {
					return err
				}
				return show(c, committed{digest, args[1]}, func(w io.Writer) error {
					_, err := fmt.Fprintln(w, digest)
					return err
				})
			})
		},
	}
}

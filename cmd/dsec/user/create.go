package user

import (
	"context"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
)

// Create is the verb that makes sandboxes.
func Create() *cobra.Command {
	var s specFlags
	var count int
	c := &cobra.Command{
		Use:   "create IMAGE [-- COMMAND [ARG...]]",
		Short: "Make a sandbox, or many, and print the ids",
		Long: `Returns when the sandboxes run. A COMMAND is the main process: its end is the end of
the sandbox. Without one the sandbox idles and takes commands by "dsec exec". It stops
after an hour in which nobody used it and is deleted an hour later: --idle, --retention.`,
		Example:           "  dsec create debian:12\n  dsec create debian:12 --layer repo:v1 --memory 2GiB --name work\n  dsec create -n 20 debian:12 --label batch=7\n  dsec create debian:12 --tier microvm --boot cold\n  dsec create debian:12 --isolation gvisor",
		Args:              cobra.MinimumNArgs(1),
		ValidArgsFunction: completeImage,
		RunE: func(c *cobra.Command, args []string) error {
			spec, err := s.build(args[0])
			if err != nil {
				return err
			}
			spec.Command = args[1:]
			return with(c, func(ctx context.Context, cl *client.Client) error {
				if count < 1 || count > dsec.MaxBatch {
					return usage("create sandboxes", fmt.Sprintf("--count wants 1 to %d", dsec.MaxBatch))
				}
				if count > 1 {
					return createMany(ctx, c, cl, spec, count)
				}
				done := await(ctx, c, cl, spec)
				sb, err := cl.Create(ctx, spec)
				done()
				if err != nil {
					return err
				}
				return show(c, sb, func(w io.Writer) error {
					_, err := fmt.Fprintln(w, sb.ID)
					return err
				})
			})
		},
	}
	s.register(c)
	c.Flags().IntVarP(&count, "count", "n", 1, "how many")
	return c
}

// createMany prints what is ready as it comes.
func createMany(ctx context.Context, c *cobra.Command, cl *client.Client, spec dsec.Spec, count int) error {
	if spec.Name != "" {
		return dsec.Errorf(dsec.Invalid, "create sandboxes", dsec.Quote(spec.Name), "a name is one sandbox's")
	}
	specs := make([]dsec.Spec, count)
	callID := spec.CallID
	spec.CallID = ""
	for i := range specs {
		specs[i] = spec
	}
	failed := 0
	var first error
	bar := newBar(c, "create", int64(count), plainCount)
	defer bar.done()
	if bar.p == nil { // else the line of the terminal is the bar's
		defer await(ctx, c, cl, spec)()
	}
	err := cl.CreateMany(ctx, specs, callID, func(r client.Created) error {
		bar.add(1)
		if r.Err != nil {
			if failed++; first == nil {
				first = r.Err
			}
			return nil
		}
		return show(c, r.Sandbox, func(w io.Writer) error {
			_, err := fmt.Fprintln(w, r.Sandbox.ID)
			return err
		})
	})
	if err != nil {
		return err
	}
	if failed > 0 {
		return dsec.Errorf(dsec.ClassOf(first), "create sandboxes", "", "%d of %d were not made, the first: %w", failed, count, first)
	}
	return nil
}

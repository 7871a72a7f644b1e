package user

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
)

// Events is the verb that prints what happens to sandboxes.
func Events() *cobra.Command {
	var e client.Events
	var labels, types []string
	var since time.Duration
	var follow bool
	c := &cobra.Command{
		Use:               "events [SANDBOX...]",
		Short:             "Print what happened to sandboxes, and what happens",
		Example:           "  dsec events -f\n  dsec events work\n  dsec events --since 10m --type oom -o json",
		ValidArgsFunction: completeSandboxes(0),
		RunE: func(c *cobra.Command, args []string) (err error) {
			if e.Labels, err = pairs("label", labels); err != nil {
				return err
			}
			for _, t := range types {
				e.Types = append(e.Types, dsec.EventType(t))
			}
			if since > 0 {
				e.Since = time.Now().Add(-since)
			}
			return with(c, func(ctx context.Context, cl *client.Client) error {
				for _, a := range args {
					id, err := find(ctx, cl, a)
					if err != nil {
						return err
					}
					e.Sandboxes = append(e.Sandboxes, id)
				}
				return printEvents(ctx, c, cl, e, follow)
			})
		},
	}
	c.Flags().BoolVarP(&follow, "follow", "f", false, "go on; without --since only what is new")
	c.Flags().DurationVar(&since, "since", 0, "only from so long ago on, like 10m")
	c.Flags().StringArrayVar(&types, "type", nil, "only of this type: state, exec_started, exec_exited, oom, expiry_warning, files, adopted, layer_error, disk_error, network, network_refused, repercussion, note (repeat)")
	c.Flags().StringArrayVarP(&labels, "label", "l", nil, "only of sandboxes with NAME=VALUE (repeat)")
	c.Flags().StringVar(&e.Rollout, "rollout", "", "only of this rollout")
	return c
}

func printEvents(ctx context.Context, c *cobra.Command, cl *client.Client, e client.Events, follow bool) error {
	if !follow {
		all, err := past(ctx, cl, e)
		for _, ev := range all {
			if err := printEvent(c, ev); err != nil {
				return err
			}
		}
		return err
	}
	broken := make(chan error, 1)
	s, err := cl.OpenSession(ctx, &e, func(ev dsec.Event) {
		if err := printEvent(c, ev); err != nil {
			select {
			case broken <- err:
			default:
			}
		}
	})
	if err != nil {
		return err
	}
	defer s.Close()
	select {
	case err := <-broken:
		return err
	case <-ctx.Done():
		return nil // ended as it should: by its user
	}
}

func printEvent(c *cobra.Command, e dsec.Event) error {
	return show(c, e, func(w io.Writer) error {
		_, err := fmt.Fprintln(w, safe(e.Time.Local().Format("15:04:05.000")+"  "+string(e.Sandbox)+"  "+describe(e)))
		return err
	})
}

// describe is an event on one line, without its time and sandbox.
func describe(e dsec.Event) string {
	parts := []string{string(e.Type)}
	if e.To != "" {
		parts = append(parts, string(e.From)+" → "+string(e.To))
	}
	for _, s := range []string{e.Exec, e.Detail} {
		if s != "" {
			parts = append(parts, s)
		}
	}
	for _, k := range sortedKeys(e.Fields) {
		parts = append(parts, k+"="+e.Fields[k])
	}
	return strings.Join(parts, "  ")
}

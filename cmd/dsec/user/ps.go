package user

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
)

// PS is the verb that lists sandboxes.
func PS() *cobra.Command {
	var o client.ListOptions
	var labels, states []string
	var quiet bool
	c := &cobra.Command{
		Use:               "ps",
		Aliases:           []string{"ls"},
		Short:             "List sandboxes",
		Example:           "  dsec ps\n  dsec ps --all --label batch=7\n  dsec ps --state running -q | xargs dsec rm",
		Args:              cobra.NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(c *cobra.Command, _ []string) (err error) {
			if o.Labels, err = pairs("label", labels); err != nil {
				return err
			}
			for _, s := range states {
				o.States = append(o.States, dsec.State(s))
			}
			return with(c, func(ctx context.Context, cl *client.Client) error { return ps(ctx, c, cl, o, quiet) })
		},
	}
	c.Flags().BoolVarP(&o.All, "all", "a", false, "ended ones too")
	c.Flags().StringArrayVarP(&labels, "label", "l", nil, "NAME=VALUE (repeat)")
	c.Flags().StringArrayVar(&states, "state", nil, "only in this state (repeat)")
	c.Flags().StringVar(&o.Rollout, "rollout", "", "only of this rollout")
	c.Flags().StringVar(&o.Project, "project", "", "admins: of another project, * for every one")
	c.Flags().BoolVarP(&quiet, "quiet", "q", false, "ids only")
	var names []string
	for _, s := range dsec.States {
		names = append(names, string(s))
	}
	_ = c.RegisterFlagCompletionFunc("state", cobra.FixedCompletions(names, cobra.ShellCompDirectiveNoFileComp)) // the flag was made above
	return c
}

func ps(ctx context.Context, c *cobra.Command, cl *client.Client, o client.ListOptions, quiet bool) error {
	all, unreachable, err := cl.List(ctx, o)
	if err != nil {
		return err
	}
	if len(unreachable) > 0 {
		fmt.Fprintf(c.ErrOrStderr(), "dsec: not listed, because they do not answer: nodes %s\n", strings.Join(unreachable, ", "))
	}
	if all == nil {
		all = []client.Sandbox{}
	}
	return show(c, all, func(w io.Writer) error {
		if quiet {
			for _, sb := range all {
				fmt.Fprintln(w, sb.ID)
			}
			return nil
		}
		rows := make([][]string, 0, len(all))
		for _, sb := range all {
			rows = append(rows, []string{string(sb.ID), sb.Spec.Name, string(sb.State), cause(sb), string(sb.Spec.Image), sb.Isolated, ago(sb.Created), string(sb.Node)})
		}
		return table(w, "ID NAME STATE CAUSE IMAGE ISOLATION CREATED NODE", rows)
	})
}

func cause(sb client.Sandbox) string {
	switch {
	case sb.Result == nil && sb.Blame != nil:
		return "(" + string(sb.Blame.Cause) + ")" // it runs, and will end so
	case sb.Result == nil:
		return ""
	}
	return string(sb.Result.Cause)
}

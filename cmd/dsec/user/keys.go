package user

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
)

// madeKey is what keys create prints as JSON.
type madeKey struct {
	client.Key
	Secret string `json:"secret"`
}

// Keys is the group of verbs for API keys.
func Keys() *cobra.Command {
	c := &cobra.Command{
		Use:     "keys",
		Short:   "Make, list and revoke API keys (admins)",
		Example: "  dsec keys create trainer\n  dsec keys ls",
	}
	c.AddCommand(keysCreate(), keysLs(), keysRevoke())
	return c
}

func keysCreate() *cobra.Command {
	var role, project string
	var lifetime time.Duration
	c := &cobra.Command{
		Use:               "create NAME",
		Short:             "Make a key and print its secret, once",
		Example:           "  dsec keys create trainer --project vision --lifetime 720h",
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(c *cobra.Command, args []string) error {
			return with(c, func(ctx context.Context, cl *client.Client) error {
				k, secret, err := cl.CreateKey(ctx, args[0], role, project, lifetime)
				if err != nil {
					return err
				}
				return show(c, madeKey{k, secret}, printLine(secret))
			})
		},
	}
	c.Flags().StringVar(&role, "role", "user", "user or admin")
	c.Flags().StringVar(&project, "project", "", "project it is for (default: default)")
	c.Flags().DurationVar(&lifetime, "lifetime", 0, "how long it is valid (default: no end)")
	_ = c.RegisterFlagCompletionFunc("role", cobra.FixedCompletions([]string{"user", "admin"}, cobra.ShellCompDirectiveNoFileComp)) // the flag was made above
	return c
}

func keysLs() *cobra.Command {
	return &cobra.Command{
		Use:               "ls",
		Short:             "List keys, without their secrets",
		Example:           "  dsec keys ls",
		Args:              cobra.NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(c *cobra.Command, _ []string) error {
			return with(c, func(ctx context.Context, cl *client.Client) error {
				all, err := cl.Keys(ctx)
				if err != nil {
					return err
				}
				if all == nil {
					all = []client.Key{}
				}
				return show(c, all, func(w io.Writer) error {
					rows := make([][]string, 0, len(all))
					for _, k := range all {
						rows = append(rows, []string{k.ID, k.Name, k.Role, k.Project, ago(k.Created), validity(k)})
					}
					return table(w, "ID NAME ROLE PROJECT CREATED VALID", rows)
				})
			})
		},
	}
}

func validity(k client.Key) string {
	switch {
	case k.Revoked:
		return "revoked"
	case k.Expires.IsZero():
		return "always"
	case time.Until(k.Expires) <= 0:
		return "expired"
	}
	return "for " + span(time.Until(k.Expires))
}

func keysRevoke() *cobra.Command {
	return &cobra.Command{
		Use:               "revoke ID...",
		Short:             "End keys",
		Example:           "  dsec keys revoke k3v5",
		Args:              cobra.MinimumNArgs(1),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(c *cobra.Command, args []string) error {
			return with(c, func(ctx context.Context, cl *client.Client) error {
				for _, id := range args {
					existed, err := cl.RevokeKey(ctx, id)
					if err == nil && !existed {
						err = dsec.Errorf(dsec.NotFound, "revoke key", dsec.Quote(id), "there is none")
					}
					if err != nil {
						return err
					}
					if err := show(c, removed{id, existed}, printLine(id)); err != nil {
						return err
					}
				}
				return nil
			})
		},
	}
}

func printLine(s string) func(io.Writer) error {
	return func(w io.Writer) error {
		_, err := fmt.Fprintln(w, s)
		return err
	}
}

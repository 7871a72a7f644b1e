package user

import (
	"io"
	"maps"
	"os"
	"slices"

	"github.com/spf13/cobra"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/contexts"
)

// named is a context as "context ls" prints it, without its key.
type named struct {
	Name    string `json:"name"`
	Current bool   `json:"current"`
	Where   string `json:"where"`
	Key     bool   `json:"key"` // it has one
}

// Context is the group of verbs for the gateways a user knows.
func Context() *cobra.Command {
	c := &cobra.Command{
		Use:   "context",
		Short: "Choose the gateway to talk to",
		Long: `Contexts are kept in ~/.config/dsec/config.json, readable by you only. DSEC_URL or
DSEC_SOCKET with DSEC_API_KEY, and DSEC_CONTEXT, go over the current one.`,
		Example: "  dsec context set lab --url https://dsec.lab:7440 --key dsec_…\n  dsec context use lab",
	}
	c.AddCommand(contextLs(), contextSet(), contextUse(), contextRm())
	return c
}

func completeContexts(*cobra.Command, []string, string) ([]cobra.Completion, cobra.ShellCompDirective) {
	f, err := contexts.Load(contexts.Path(os.Getenv))
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	return slices.Sorted(maps.Keys(f.Contexts)), cobra.ShellCompDirectiveNoFileComp
}

// change loads the contexts, changes and saves them.
func change(fn func(f *contexts.File) error) error {
	path := contexts.Path(os.Getenv)
	f, err := contexts.Load(path)
	if err != nil {
		return err
	}
	if err := fn(&f); err != nil {
		return err
	}
	return f.Save(path)
}

func unknown(name string) error {
	return dsec.Errorf(dsec.NotFound, "find context", dsec.Quote(name), "there is no such context")
}

func contextLs() *cobra.Command {
	return &cobra.Command{
		Use:               "ls",
		Short:             "List contexts",
		Example:           "  dsec context ls",
		Args:              cobra.NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(c *cobra.Command, _ []string) error {
			f, err := contexts.Load(contexts.Path(os.Getenv))
			if err != nil {
				return err
			}
			list := []named{}
			for _, n := range slices.Sorted(maps.Keys(f.Contexts)) {
				x := f.Contexts[n]
				where := x.URL
				if x.Socket != "" {
					where = x.Socket
				}
				list = append(list, named{n, n == f.Current, where, x.APIKey != ""})
			}
			return show(c, list, func(w io.Writer) error {
				var rows [][]string
				for _, x := range list {
					mark := ""
					if x.Current {
						mark = "*"
					}
					rows = append(rows, []string{mark, x.Name, x.Where})
				}
				return table(w, "CURRENT NAME WHERE", rows)
			})
		},
	}
}

func contextSet() *cobra.Command {
	var x contexts.Context
	c := &cobra.Command{
		Use:               "set NAME",
		Short:             "Add or replace a context",
		Example:           "  dsec context set lab --url https://dsec.lab:7440 --key dsec_…\n  dsec context set here --socket /run/dsec/gateway.sock",
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: completeContexts,
		RunE: func(c *cobra.Command, args []string) error {
			if (x.URL == "") == (x.Socket == "") {
				return usage("set context", "give one of --url and --socket")
			}
			return change(func(f *contexts.File) error {
				f.Contexts[args[0]] = x
				if f.Current == "" {
					f.Current = args[0]
				}
				return nil
			})
		},
	}
	c.Flags().StringVar(&x.URL, "url", "", "http(s) URL of the gateway")
	c.Flags().StringVar(&x.Socket, "socket", "", "path of its unix socket")
	c.Flags().StringVar(&x.APIKey, "key", "", "API key")
	return c
}

func contextUse() *cobra.Command {
	return &cobra.Command{
		Use:               "use NAME",
		Short:             "Make a context the current one",
		Example:           "  dsec context use lab",
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: completeContexts,
		RunE: func(_ *cobra.Command, args []string) error {
			return change(func(f *contexts.File) error {
				if _, ok := f.Contexts[args[0]]; !ok {
					return unknown(args[0])
				}
				f.Current = args[0]
				return nil
			})
		},
	}
}

func contextRm() *cobra.Command {
	return &cobra.Command{
		Use:               "rm NAME",
		Short:             "Forget a context",
		Example:           "  dsec context rm lab",
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: completeContexts,
		RunE: func(_ *cobra.Command, args []string) error {
			return change(func(f *contexts.File) error {
				if _, ok := f.Contexts[args[0]]; !ok {
					return unknown(args[0])
				}
				delete(f.Contexts, args[0])
				if f.Current == args[0] {
					f.Current = ""
				}
				return nil
			})
		},
	}
}

package user

import (
	"context"
	"fmt"
	"io"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
)

// Findings is the verb that looks for reward hacks in what a sandbox did.
func Findings() *cobra.Command {
	var task dsec.HackTask
	least := dsec.HackConfidence
	c := &cobra.Command{
		Use:   "findings SANDBOX",
		Short: "Look for reward hacks in what a sandbox did",
		Long: `Judges the audit log and the events of a sandbox, which may have ended. What is told is
a reason to look, never a verdict: nothing of dsec depends on it. Declare what the task is
about: without --tests, --results and --trusted much is a guess. docs/guides/findings.md says
what is looked for, and how often it is right.`,
		Example:           "  dsec findings work\n  dsec findings work --tests '/repo/tests/**' --results '/logs/**' --trusted 'grade*' --project wordkit -o json",
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: completeSandboxes(1),
		RunE: func(c *cobra.Command, args []string) error {
			return with(c, func(ctx context.Context, cl *client.Client) error {
				id, err := find(ctx, cl, args[0])
				if err != nil {
					return err
				}
				all, err := cl.Findings(ctx, id, task)
				if err != nil {
					return err
				}
				found := []dsec.HackFinding{}
				for _, f := range all {
					if f.Confidence >= least {
						found = append(found, f)
					}
				}
				return show(c, found, func(w io.Writer) error { return showHacks(w, found) })
			})
		},
	}
	f := c.Flags()
	f.StringArrayVar(&task.Tests, "tests", nil, "files that judge the work, like '/repo/tests/**' (repeat)")
	f.StringArrayVar(&task.Harness, "harness", nil, "programs and files of the harness (repeat)")
	f.StringArrayVar(&task.Results, "results", nil, "files that only the harness writes (repeat)")
	f.StringArrayVar(&task.Trusted, "trusted", nil, "ids of the harness's commands, like 'grade*' (repeat)")
	f.StringArrayVar(&task.Phases, "phase", nil, "phase in which only the harness runs commands (repeat)")
	f.StringArrayVar(&task.Project, "project", nil, "name of what is worked on, as others publish it (repeat)")
	f.Float64Var(&least, "min", least, "only findings of this confidence or more, 0 to 1")
	return c
}

func showHacks(w io.Writer, found []dsec.HackFinding) error {
	if len(found) == 0 {
		_, err := fmt.Fprintln(w, "nothing found")
		return err
	}
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	fmt.Fprintln(t, "CLASS\tCONFIDENCE\tSIGNS\tFIRST\tRECORDS\tWHAT SPEAKS FOR IT")
	for _, f := range found {
		fmt.Fprintf(t, "%s\t%.2f\t%d\t%s\t%s\t%s\n", f.Class, f.Confidence, f.Count, f.First.Local().Format("15:04:05"), some(f.Evidence), safe(shorten(f.Title)))
		for _, l := range f.Lines[1:min(len(f.Lines), 4)] {
			fmt.Fprintf(t, "\t\t\t\t\t%s\n", safe(shorten(l)))
		}
	}
	return t.Flush()
}

const lineRunes = 100

func shorten(s string) string {
	if r := []rune(s); len(r) > lineRunes {
		return string(r[:lineRunes-1]) + "…"
	}
	return s
}

// some are the first numbers of a list.
func some(seqs []uint64) (s string) {
	for i, n := range seqs {
		if i == 3 {
			return s + ",…"
		}
		if i > 0 {
			s += ","
		}
		s += fmt.Sprint(n)
	}
	return s
}

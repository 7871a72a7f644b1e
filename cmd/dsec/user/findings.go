package user

import (
	"context"
	"fmt"
	"io"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/audit/detect"
	"github.com/opendsec/dsec/client"
)

// Findings is the verb that looks for reward hacks in what a sandbox did.
func Findings() *cobra.Command {
	var cfg detect.Config
	least := detect.DefaultThreshold
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
			d, err := detect.New(cfg)
			if err != nil {
				return err
			}
			return with(c, func(ctx context.Context, cl *client.Client) error {
				id, err := find(ctx, cl, args[0])
				if err != nil {
					return err
				}
				if err := replay(ctx, cl, id, d); err != nil {
					return err
				}
				found := []dsec.HackFinding{}
				for _, f := range d.Findings() {
					if f.Confidence >= least {
						found = append(found, f)
					}
				}
				return show(c, found, func(w io.Writer) error { return showHacks(w, found) })
			})
		},
	}
	f := c.Flags()
	f.StringArrayVar(&cfg.Tests, "tests", nil, "files that judge the work, like '/repo/tests/**' (repeat)")
	f.StringArrayVar(&cfg.Harness, "harness", nil, "programs and files of the harness (repeat)")
	f.StringArrayVar(&cfg.Results, "results", nil, "files that only the harness writes (repeat)")
	f.StringArrayVar(&cfg.Trusted, "trusted", nil, "ids of the harness's commands, like 'grade*' (repeat)")
	f.StringArrayVar(&cfg.Phases, "phase", nil, "phase in which only the harness runs commands (repeat)")
	f.StringArrayVar(&cfg.Project, "project", nil, "name of what is worked on, as others publish it (repeat)")
	f.Float64Var(&least, "min", least, "only findings of this confidence or more, 0 to 1")
	return c
}

// replay gives a detector all that is known of a sandbox.
func replay(ctx context.Context, cl *client.Client, id dsec.SandboxID, d *detect.Detector) error {
	var records []dsec.AuditRecord
	if err := cl.Audit(ctx, id, dsec.AuditFilter{}, func(r dsec.AuditRecord) error {
		records = append(records, r)
		return nil
	}); err != nil {
		return err
	}
	events, err := past(ctx, cl, client.Events{Sandboxes: []dsec.SandboxID{id}})
	if err != nil {
		return err
	}
	d.Replay(records, events)
	sb, err := cl.Get(ctx, id)
	if err == nil && sb.Result != nil {
		d.AddResult(*sb.Result, sb.Changed)
	}
	if dsec.ClassOf(err) == dsec.NotFound { // removed; its log is still there
		err = nil
	}
	return err
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

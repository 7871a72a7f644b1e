package user

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/layer"
)

// scrubFlags say what to leave out of a layer.
type scrubFlags struct {
	rules    []string
	patterns []string
	answers  []string
}

func (s *scrubFlags) register(c *cobra.Command) {
	f := c.Flags()
	f.StringSliceVar(&s.rules, "scrub", nil, "leave out: histories, credentials, caches, logs (of package managers), or all")
	f.StringArrayVar(&s.patterns, "scrub-path", nil, "leave out what matches, like '/data/private/**' (repeat)")
	f.StringArrayVar(&s.answers, "scrub-answer", nil, "leave out files equal to this one: a SHA-256, or @FILE (repeat)")
	_ = c.RegisterFlagCompletionFunc("scrub", cobra.FixedCompletions([]string{"all", "histories", "credentials", "caches", "logs"},
		cobra.ShellCompDirectiveNoFileComp)) // the flag was made above
}

func (s *scrubFlags) build() (dsec.Scrub, error) {
	out := dsec.Scrub{Patterns: s.patterns}
	for _, r := range s.rules {
		switch r {
		case "all":
			all := dsec.ScrubAll()
			out.Histories, out.Credentials, out.Caches, out.Logs = all.Histories, all.Credentials, all.Caches, all.Logs
		case "histories":
			out.Histories = true
		case "credentials":
			out.Credentials = true
		case "caches":
			out.Caches = true
		case "logs":
			out.Logs = true
		default:
			return out, dsec.Errorf(dsec.Invalid, "read flag", "--scrub", "%s is not histories, credentials, caches, logs or all", dsec.Quote(r))
		}
	}
	for _, a := range s.answers {
		if file, ok := strings.CutPrefix(a, "@"); ok {
			sum, err := sumOfFile(file)
			if err != nil {
				return out, err
			}
			a = sum
		} else if b, err := hex.DecodeString(a); err != nil || len(b) != sha256.Size {
			return out, dsec.Errorf(dsec.Invalid, "read flag", "--scrub-answer", "%s is not a SHA-256; for a file write %s", dsec.Quote(a), dsec.Quote("@"+a))
		}
		out.Answers = append(out.Answers, strings.ToLower(a))
	}
	return out, out.Validate()
}

func sumOfFile(name string) (string, error) {
	f, err := os.Open(name)
	if err != nil {
		return "", hostError("read", name, err)
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return "", hostError("read", name, err)
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// Commit is the verb that makes a layer of a sandbox's disk.
func Commit() *cobra.Command {
	var scrub scrubFlags
	var callID string
	c := &cobra.Command{
		Use:   "commit SANDBOX TAG",
		Short: "Make a layer of what a sandbox wrote",
		Long: `Packs what the disk differs in from its layers, as it is at one moment. A sandbox that runs
stands still for that moment and goes on. The tag then is an image: a sandbox created from
it goes on from there.

With --scrub, histories, credentials and what else is named are not in the layer; what
looks like a secret and is kept is listed. Read the list before you share the layer.`,
		Example:           "  dsec commit work repo:patched\n  dsec create repo:patched\n  dsec commit work env:v2 --scrub all --scrub-answer @solution.txt -o json",
		Args:              cobra.ExactArgs(2),
		ValidArgsFunction: completeSandboxes(1),
		RunE: func(c *cobra.Command, args []string) error {
			rules, err := scrub.build()
			if err != nil {
				return err
			}
			return with(c, func(ctx context.Context, cl *client.Client) error {
				id, err := find(ctx, cl, args[0])
				if err != nil {
					return err
				}
				said := tagging(ctx, c, cl, args[1])
				packed, err := cl.Commit(ctx, id, client.CommitOptions{Tag: args[1], Scrub: rules, CallID: callID})
				if err != nil {
					return err
				}
				said(layer.Digest(packed.Digest))
				return show(c, packed, func(w io.Writer) error { return describePacked(w, packed) })
			})
		},
	}
	scrub.register(c)
	c.Flags().StringVar(&callID, "call-id", "", "key that makes the call idempotent")
	return c
}

// describePacked prints the digest, and what a scrub did.
func describePacked(w io.Writer, p dsec.Packed) error {
	if _, err := fmt.Fprintln(w, p.Digest); err != nil {
		return err
	}
	r := p.Report
	if r == nil {
		return nil
	}
	if _, err := fmt.Fprintf(w, "\nleft out: %d files of %s\n", r.RemovedCount, size(r.RemovedBytes)); err != nil {
		return err
	}
	if err := showFindings(w, r.Removed, r.RemovedCount); err != nil {
		return err
	}
	if r.Unread > 0 {
		if _, err := fmt.Fprintf(w, "\nnot compared with the answers, or not read to their end for credentials, because they are too large: %d files\n", r.Unread); err != nil {
			return err
		}
	}
	if r.SuspiciousCount == 0 {
		return nil
	}
	if _, err := fmt.Fprintf(w, "\nin the layer, and worth a look: %d\n", r.SuspiciousCount); err != nil {
		return err
	}
	return showFindings(w, r.Suspicious, r.SuspiciousCount)
}

func showFindings(w io.Writer, list []dsec.Finding, count int64) error {
	if len(list) == 0 {
		return nil
	}
	rows := make([][]string, 0, len(list)+1)
	for _, f := range list {
		why, at := f.Why, f.Path
		if f.Below {
			why += "; a layer below has the path, too"
		}
		if f.Line > 0 {
			at += fmt.Sprintf(":%d", f.Line)
		}
		rows = append(rows, []string{at, size(f.Size), why})
	}
	if more := count - int64(len(list)); more > 0 {
		rows = append(rows, []string{fmt.Sprintf("… and %d more", more)})
	}
	return table(w, "PATH SIZE WHY", rows)
}

package daemon

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/sizes"
	"github.com/opendsec/dsec/layer/gc"
)

// LayerGC is the verb that removes from object storage what no node keeps. It
// opens the storage itself and needs no daemon.
func LayerGC() *cobra.Command {
	var s settings
	var o gc.Options
	c := &cobra.Command{
		Use:   "gc [--delete]",
		Short: "Say what object storage has for nobody; with --delete, remove it",
		Long: `Looks at what the nodes that share the object storage of the configuration keep,
and prints what nobody does. With --delete, what nobody keeps is condemned, and
what an earlier run condemned, --wait ago or longer, and still nobody keeps, is
removed. Nodes may go on meanwhile; a run that was killed is taken up by the next.

Where the object storage is, the configuration says, not the socket: --config, else
` + defaultFile + `, else the defaults. Keys of S3 come from the environment or
from the credentials file.`,
		Example: "  sudo dsec layer gc\n  sudo dsec layer gc --delete --config /srv/dsec/dsec.yaml\n  sudo dsec layer gc -o json",
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := s.load(); err != nil {
				return err
			}
			for flag, d := range map[string]time.Duration{"--grace": o.Grace, "--wait": o.Wait, "--expiry": o.Expiry} {
				if d <= 0 {
					return dsec.Errorf(dsec.Invalid, "collect garbage", flag, "%v, want more than 0", d)
				}
			}
			return collectStore(c, &s, o)
		},
	}
	s.register(c)
	c.Flags().BoolVar(&o.Delete, "delete", false, "condemn, and remove what was condemned")
	c.Flags().DurationVar(&o.Grace, "grace", gc.DefaultGrace, "keep what is younger")
	c.Flags().DurationVar(&o.Wait, "wait", gc.DefaultWait, "how long something is condemned before it is removed")
	c.Flags().DurationVar(&o.Expiry, "expiry", gc.DefaultExpiry, "forget what a node keeps that has not been heard of for so long")
	return c
}

func collectStore(c *cobra.Command, s *settings, o gc.Options) error {
	store, err := lookBlobs(c.Context(), s)
	if err != nil {
		return err
	}
	defer store.Close()
	host, _ := os.Hostname() // for people
	o.Owner, o.Log = fmt.Sprintf("%s %d", host, os.Getpid()), slog.New(slog.NewTextHandler(c.ErrOrStderr(), nil))
	r, err := gc.Collect(c.Context(), store, o)
	if r.Rows == nil {
		return err
	}
	if wantJSON(c) {
		if perr := json.NewEncoder(c.OutOrStdout()).Encode(r); err == nil {
			err = perr
		}
		return err
	}
	if perr := printCollection(c.OutOrStdout(), r, o); err == nil {
		err = perr
	}
	return err
}

func printCollection(w io.Writer, r gc.Report, o gc.Options) error {
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	verb := map[bool][2]string{true: {"CONDEMNED", "REMOVED"}, false: {"TO CONDEMN", "TO REMOVE"}}[r.Deleted]
	fmt.Fprintf(t, "KIND\tALL\tKEPT\tNEW\tWAITING\t%s\t%s\n", verb[0], verb[1])
	var frees, later int64
	for _, row := range r.Rows {
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\t%s\n", row.Kind, counted(row.All), counted(row.Kept), counted(row.Young), counted(row.Waiting), counted(row.Condemn), counted(row.Delete))
		frees, later = frees+row.Delete.Bytes, later+row.Condemn.Bytes+row.Waiting.Bytes
	}
	if err := t.Flush(); err != nil {
		return err
	}
	printRoots(w, r.Roots)
	if len(r.Roots) == 0 {
		fmt.Fprintln(w, "no node says what it keeps: nothing can be removed")
	}
	for _, key := range r.Missing {
		fmt.Fprintf(w, "missing: %s is needed and not there\n", key)
	}
	for _, d := range r.Damaged {
		fmt.Fprintf(w, "damaged: %s: %s\n", d.Key, d.Error)
	}
	if r.Unknown.Objects > 0 {
		fmt.Fprintf(w, "not of layers, left alone: %s\n", counted(r.Unknown))
	}
	fmt.Fprintf(w, "dead bytes in kept packs: %s\n", sized(r.Dead))
	if r.Deleted {
		fmt.Fprintf(w, "removed %s; %s may follow when %v have passed\n", sized(frees), sized(later), o.Wait)
		return nil
	}
	_, err := fmt.Fprintf(w, "nothing was changed; --delete would remove %s now, %s may follow when %v have passed\n", sized(frees), sized(later), o.Wait)
	return err
}

// printRoots prints a line for each node: work in progress adds lists to the one
// that a node renews. Those that have expired, and count no more, are apart.
func printRoots(w io.Writer, roots []gc.RootInfo) {
	type group struct {
		node    string
		expired bool
	}
	var order []group
	lists := map[group][]gc.RootInfo{}
	for _, r := range roots {
		g := group{r.Node, r.Expired}
		if lists[g] == nil {
			order = append(order, g)
		}
		lists[g] = append(lists[g], r)
	}
	for _, g := range order {
		keeps, youngest := 0, lists[g][0].Age
		for _, r := range lists[g] {
			keeps, youngest = keeps+r.Keeps, min(youngest, r.Age)
		}
		in, state := "", ""
		if n := len(lists[g]); n > 1 {
			in = fmt.Sprintf(" in %d lists", n)
		}
		if g.expired {
			state = ": expired"
		}
		fmt.Fprintf(w, "kept by %s: %d objects%s, said %v ago%s\n", dsec.Quote(g.node), keeps, in, youngest.Round(time.Second), state)
	}
}

func counted(c gc.Count) string {
	if c.Objects == 0 {
		return "-"
	}
	return fmt.Sprintf("%d (%s)", c.Objects, sized(c.Bytes))
}

// sized is a number of bytes for people.
func sized(n int64) string { return sizes.Text(n) }

// progressed prints how far something is, on one line of a terminal.
func progressed(w io.Writer, what string) (progress func(done, total int64), end func()) {
	f, ok := w.(*os.File)
	if !ok || !term.IsTerminal(int(f.Fd())) {
		return nil, func() {}
	}
	last := ""
	return func(done, total int64) {
			line := fmt.Sprintf("\r%s: %s of %s", what, sized(done), sized(total))
			if line != last {
				fmt.Fprint(f, line, strings.Repeat(" ", max(0, len(last)-len(line))))
				last = line
			}
		}, func() {
			fmt.Fprint(f, "\r", strings.Repeat(" ", len(last)), "\r")
		}
}

// keeping says in object storage what the store keeps, until stop is called,
// which waits for it.
func keeping(renew func(context.Context) error, every time.Duration, log *slog.Logger) (stop func()) {
	return repeating(0, every, func(ctx context.Context) {
		if err := renew(ctx); err != nil && ctx.Err() == nil {
			log.Warn("say in object storage which layers are kept", "err", err)
		}
	})
}

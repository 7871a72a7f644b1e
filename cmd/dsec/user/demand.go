package user

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
)

func layerStat() *cobra.Command {
	return &cobra.Command{
		Use:   "stat",
		Short: "Show what has come of layers whose data come as they are read",
		Long: `Layers that are mounted, or whose data are not all here. TOUCHED is what sandboxes have
read and is in the page cache, FETCHED what came from object storage, compressed, and what
it became. WAITED is how many reads waited for that, and how long, added. Counts begin
anew when nobody has a layer mounted any more.`,
		Example:           "  dsec layer stat\n  dsec layer stat -o json",
		Args:              cobra.NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(c *cobra.Command, _ []string) error {
			return with(c, func(ctx context.Context, cl *client.Client) error {
				all, err := cl.LayersOnDemand(ctx)
				if err != nil {
					return err
				}
				return show(c, all, func(w io.Writer) error { return printDemand(w, all) })
			})
		},
	}
}

func printDemand(w io.Writer, all []client.LayerDemand) error {
	rows, failed := make([][]string, 0, len(all)), make([]string, 0)
	for _, l := range all {
		touched := "-"
		if l.Touched >= 0 {
			touched = size(l.Touched)
		}
		how := "plain files"
		switch {
		case l.Served:
			how = "served"
		case l.Here < l.Chunks:
			how = "not mounted"
		}
		rows = append(rows, []string{strings.Join(l.Tags, ","), shortDigest(string(l.Digest)), size(l.DataSize), share(l.Here, l.Chunks), how, touched,
			fmt.Sprintf("%s → %s", size(l.Fetched), size(l.Plain)), fmt.Sprint(l.Requests), fmt.Sprintf("%d, %s", l.Stalls, span(l.Stalled)), fmt.Sprint(l.Failures)})
		if l.Failures > 0 {
			failed = append(failed, fmt.Sprintf("%s: %s", shortDigest(string(l.Digest)), safe(l.LastFailure)))
		}
	}
	if err := table(w, "TAGS DIGEST DATA HERE READ TOUCHED FETCHED REQUESTS WAITED FAILED", rows); err != nil || len(failed) == 0 {
		return err
	}
	_, err := fmt.Fprintf(w, "\nlast failures\n%s\n", strings.Join(failed, "\n"))
	return err
}

func layerEvict() *cobra.Command {
	return &cobra.Command{
		Use:   "evict LAYER...",
		Short: "Give back the room that the data of layers take here",
		Long: `The data are in object storage and come again as sandboxes read them; what was read first
this time is brought ahead then. A layer that a sandbox has is left as it is, which is an
error. One that is small enough to be fetched whole stays, too.`,
		Example:           "  dsec layer evict debian:12\n  dsec layer evict repo:v1 tools:v1",
		Args:              cobra.MinimumNArgs(1),
		ValidArgsFunction: completeLayers,
		RunE: func(c *cobra.Command, args []string) error {
			return with(c, func(ctx context.Context, cl *client.Client) error {
				var errs []error
				done := []evicted{}
				for _, ref := range args {
					freed, err := cl.EvictLayer(ctx, dsec.LayerRef(ref))
					if err != nil {
						errs = append(errs, err)
						continue
					}
					done = append(done, evicted{ref, freed})
				}
				return errors.Join(append(errs, show(c, done, func(w io.Writer) error {
					for _, e := range done {
						if _, err := fmt.Fprintf(w, "%s: %s free\n", e.Layer, size(e.Freed)); err != nil {
							return err
						}
					}
					return nil
				}))...)
			})
		},
	}
}

// evicted is what came of one layer.
type evicted struct {
	Layer string `json:"layer"`
	Freed int64  `json:"freed"` // bytes
}

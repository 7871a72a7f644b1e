package user

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
)

func imageEnsure() *cobra.Command {
	var o client.EnsureOptions
	c := &cobra.Command{
		Use:   "ensure REFERENCE...",
		Short: "Make images of registries known ahead",
		Long: `Fetches and converts each OCI layer once, whatever image it is in, and has it whole before the
first sandbox asks. Sandboxes then start from the reference. All who ask for an image share the work.
A reference is looked up again each time; sandboxes use what it meant when it was looked up last.`,
		Example:           "  dsec image ensure docker.io/library/python:3.12 ghcr.io/team/app:v3",
		Args:              cobra.MinimumNArgs(1),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(c *cobra.Command, args []string) error {
			return with(c, func(ctx context.Context, cl *client.Client) error {
				b := newBar(c, "ensure", 0, size)
				o.Progress = newEnsureBar(b).show
				all, err := cl.Ensure(ctx, args, o)
				b.done()
				if err != nil {
					return err
				}
				return showLayers(c, all, "LAYERS", func(l client.Layer) string { return fmt.Sprint(max(1, len(l.Layers))) })
			})
		},
	}
	c.Flags().DurationVar(&o.MaxAge, "max-age", 0, "what a reference meant so long ago will do (default: look now)")
	return c
}

// ensureBar is one bar for several images.
type ensureBar struct {
	b   *bar
	all map[string]client.EnsureProgress
}

func newEnsureBar(b *bar) *ensureBar {
	return &ensureBar{b: b, all: map[string]client.EnsureProgress{}}
}

func (e *ensureBar) show(p client.EnsureProgress) {
	if last := e.all[p.Ref]; p.Phase == "ready" { // it has no numbers of its own
		p.Done, p.Total = last.Total, last.Total
	}
	e.all[p.Ref] = p
	var sum client.Progress
	for _, x := range e.all {
		sum.Done, sum.Total = sum.Done+x.Done, sum.Total+x.Total
	}
	sum.Phase = p.Phase
	switch {
	case p.Queue > 0:
		sum.Phase = fmt.Sprintf("queued, %d before", p.Queue-1)
	case p.Left > 0 && e.b.lines == nil:
		sum.Phase = fmt.Sprintf("%s, %s left", p.Phase, p.Left.Round(time.Second))
	}
	e.b.progress(sum)
}

func imageMerge() *cobra.Command {
	var auto, dry bool
	c := &cobra.Command{
		Use:   "merge IMAGE...|--auto",
		Short: "Make one layer of layers that images share at their bottom",
		Long: `Whiteouts among the layers are resolved, so what a later layer hides is stored no more. The images show
what they showed; sandboxes that run keep the layers they have. Layers nobody uses then go with the next
collection.`,
		Example:           "  dsec image merge python:3.12 app:v3\n  dsec image merge --auto --dry-run",
		ValidArgsFunction: completeLayers,
		Args: func(_ *cobra.Command, args []string) error {
			if auto == (len(args) > 0) {
				return dsec.Errorf(dsec.Invalid, "merge", "", "name images, or say --auto")
			}
			return nil
		},
		RunE: func(c *cobra.Command, args []string) error {
			return with(c, func(ctx context.Context, cl *client.Client) error {
				var refs []dsec.LayerRef
				for _, a := range args {
					refs = append(refs, dsec.LayerRef(a))
				}
				all, err := cl.MergeLayers(ctx, refs, dry)
				if err != nil {
					return err
				}
				return showMerged(c, all)
			})
		},
	}
	c.Flags().BoolVar(&auto, "auto", false, "wherever at least two images share layers")
	c.Flags().BoolVar(&dry, "dry-run", false, "only say what would be merged")
	return c
}

func showMerged(c *cobra.Command, all []client.Merged) error {
	if all == nil {
		all = []client.Merged{} // as JSON: []
	}
	return show(c, all, func(w io.Writer) error {
		rows := make([][]string, 0, len(all))
		for _, m := range all {
			after := "-"
			if m.Layer != "" {
				after = size(m.After)
			}
			rows = append(rows, []string{fmt.Sprint(len(m.Layers)), size(m.Before), after, shortDigest(string(m.Layer)), strings.Join(m.Images, ",")})
		}
		return table(w, "LAYERS APART MERGED LAYER IMAGES", rows)
	})
}

func imageExport() *cobra.Command {
	return &cobra.Command{
		Use:   "export IMAGE FILE",
		Short: "Write an image as an OCI image archive",
		Long: `One OCI layer for each layer, with whiteouts as OCI has them; docker load and dsec image import read it.
"-" is stdout.`,
		Example:           "  dsec image export app:v3 app.tar\n  dsec image export app:v3 - | docker load",
		Args:              cobra.ExactArgs(2),
		ValidArgsFunction: completeImage,
		RunE: func(c *cobra.Command, args []string) error {
			return with(c, func(ctx context.Context, cl *client.Client) error {
				b := newBar(c, "export", 0, size)
				defer b.done()
				if args[1] == "-" {
					return cl.ExportImage(ctx, dsec.LayerRef(args[0]), counting{w: c.OutOrStdout(), b: b})
				}
				return exportTo(ctx, cl, args[0], args[1], b)
			})
		},
	}
}

// exportTo writes a file that is there whole or not at all.
func exportTo(ctx context.Context, cl *client.Client, ref, to string, b *bar) error {
	f, err := os.CreateTemp(filepath.Dir(to), ".export-*")
	if err != nil {
		return hostError("write", to, err)
	}
	defer os.Remove(f.Name()) // if it is still there
	err = cl.ExportImage(ctx, dsec.LayerRef(ref), counting{w: f, b: b})
	if cerr := f.Close(); err == nil && cerr != nil {
		err = hostError("write", to, cerr)
	}
	if err != nil {
		return err
	}
	if err := os.Chmod(f.Name(), 0o644); err != nil {
		return hostError("write", to, err)
	}
	if err := os.Rename(f.Name(), to); err != nil {
		return hostError("write", to, err)
	}
	return nil
}

package user

import (
	"context"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
)

func layerTrace() *cobra.Command {
	return &cobra.Command{
		Use:   "trace LAYER",
		Short: "Show what is read first of a layer, and by how many",
		Long: `Files in the order in which sandboxes first touch them. TOUCHED is what any recording
read of a file, EXPECTED what is fetched before the next sandbox asks for it: what enough
of the recordings read. dsec layer repack lays the data out in this order.`,
		Example:           "  dsec layer trace repo:v1\n  dsec layer trace repo:v1 -o json",
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: completeLayers,
		RunE: func(c *cobra.Command, args []string) error {
			return with(c, func(ctx context.Context, cl *client.Client) error {
				t, err := cl.LayerTrace(ctx, dsec.LayerRef(args[0]))
				if err != nil {
					return err
				}
				if t.Files == nil {
					t.Files = []client.TracedFile{} // as JSON: []
				}
				return show(c, t, func(w io.Writer) error { return printTrace(w, t) })
			})
		},
	}
}

func printTrace(w io.Writer, t client.LayerTrace) error {
	p := page{w: w}
	p.line("digest", string(t.Digest))
	p.line("recordings", fmt.Sprintf("%d, of at most %s", t.Recordings, t.Window))
	p.line("touched", fmt.Sprintf("%s of %s, %s", size(t.Touched), size(t.DataSize), share(t.Touched, t.DataSize)))
	p.line("expected", fmt.Sprintf("%s, %s", size(t.Expected), share(t.Expected, t.DataSize)))
	p.head("FILES")
	if p.err != nil {
		return p.err
	}
	rows := make([][]string, 0, len(t.Files))
	for i, f := range t.Files {
		rows = append(rows, []string{fmt.Sprint(i + 1), size(f.Touched), share(f.Touched, f.Size), size(f.Expected),
			fmt.Sprintf("%d/%d", f.Count, t.Recordings), share(f.Touched, t.DataSize), f.Path})
	}
	if err := table(w, "ORDER TOUCHED OF-FILE EXPECTED BY OF-LAYER PATH", rows); err != nil || t.More == 0 {
		return err
	}
	_, err := fmt.Fprintf(w, "and %d more files\n", t.More)
	return err
}

// share in percent; a last block of a file can be more than the file.
func share(part, of int64) string {
	if of <= 0 {
		return "0.0%"
	}
	return fmt.Sprintf("%.1f%%", 100*min(1, float64(part)/float64(of)))
}

func layerRepack() *cobra.Command {
	var tag string
	c := &cobra.Command{
		Use:   "repack LAYER",
		Short: "Make a layer of the same files, its data in the order in which they are read",
		Long: `The new layer has another digest and the same tree. What its trace expects to be read
comes first, in few large requests. Sandboxes keep the layer they have; --tag points a
tag, which may be that of the old one, to the new one.`,
		Example:           "  dsec layer repack debian:12 --tag debian:12\n  dsec layer repack repo:v1 --tag repo:v1-ordered",
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: completeLayers,
		RunE: func(c *cobra.Command, args []string) error {
			return with(c, func(ctx context.Context, cl *client.Client) error {
				said := tagging(ctx, c, cl, tag)
				b := newBar(c, "repack", 0, size)
				l, err := cl.RepackLayer(ctx, dsec.LayerRef(args[0]), tag, b.progress)
				b.done()
				if err != nil {
					return err
				}
				said(l.Digest)
				return showLayer(c, l)
			})
		},
	}
	c.Flags().StringVar(&tag, "tag", "", "tag that points to the new layer (default: none, its digest names it)")
	return c
}

package user

import (
	"archive/tar"
	"context"
	"fmt"
	"io"
	"os"
	"path"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/files"
)

// Layer is the group of verbs for workspaces and toolkits.
func Layer() *cobra.Command {
	c := &cobra.Command{
		Use:   "layer",
		Short: "Build, list, inspect, repack and evict layers",
		Long: `A layer is a tree of files that never changes, named by its digest; tags point to it. The
list has four kinds: an image has all that a sandbox needs; a layer, a workspace or a
toolkit, goes above one (create --layer); a disk is what a sandbox wrote, and can be used
as an image (dsec commit); a template is a name for some of them together.`,
		Example: "  dsec layer build --from ./repo --at /work --owner 1000 --tag repo:v1\n  dsec layer ls",
	}
	c.AddCommand(layerBuild(), layerLs(), layerInspect(), layerTrace(), layerRepack(), layerStat(), layerEvict())
	return c
}

func layerBuild() *cobra.Command {
	var from string
	var o client.BuildOptions
	c := &cobra.Command{
		Use:   "build --from DIR|TAR|REFERENCE",
		Short: "Make a layer of a directory, a tar or an image",
		Long: `A directory or a tar here is sent to the server. What is neither is an OCI reference,
or with a leading "server:" a path on the server below a root it allows. What begins with
./ ../ / or ~, or ends with /, is a path and never a reference.`,
		Example:           "  dsec layer build --from ./repo --at /work --owner 1000 --tag repo:v1\n  dsec layer build --from tools.tar.gz --at /opt/tools --tag tools:v1\n  dsec layer build --from docker.io/library/golang:1.26 --tag golang:1.26",
		Args:              cobra.NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(c *cobra.Command, _ []string) error {
			return with(c, func(ctx context.Context, cl *client.Client) error {
				said := tagging(ctx, c, cl, o.Tag)
				l, err := buildFrom(ctx, c, cl, from, o)
				if err != nil {
					return err
				}
				said(l.Digest)
				return showLayer(c, l)
			})
		},
	}
	c.Flags().StringVar(&from, "from", "", "directory, tar or OCI reference")
	c.Flags().StringVar(&o.Tag, "tag", "", "tag that points to the layer (default: none, its digest names it)")
	c.Flags().StringVar(&o.At, "at", "", "where in a sandbox the tree is placed (default /)")
	c.Flags().StringVar(&o.Owner, "owner", "", "uid[:gid] of everything (default: as in the source)")
	_ = c.MarkFlagRequired("from") // the flag was made above
	return c
}

func buildFrom(ctx context.Context, c *cobra.Command, cl *client.Client, from string, o client.BuildOptions) (client.Layer, error) {
	st, there, err := source(from)
	if err != nil {
		return client.Layer{}, err
	}
	if st == nil {
		b := newBar(c, "build", 0, size)
		defer b.done()
		return cl.Build(ctx, there, o, b.progress)
	}
	b := newBar(c, "send", 0, size)
	defer b.done()
	if !st.IsDir() {
		f, err := os.Open(from)
		if err != nil {
			return client.Layer{}, hostError("read", from, err)
		}
		defer f.Close()
		b.set(0, st.Size())
		return cl.UploadTree(ctx, counting{r: f, b: b}, o)
	}
	return sendDir(ctx, from, path.Clean("/"+o.At) != "/", func(r io.Reader) (client.Layer, error) {
		return cl.UploadTree(ctx, counting{r: r, b: b}, o)
	})
}

// packTop writes what the directory itself is like, as the first entry of a tar
// that goes on.
func packTop(w io.Writer, dir string) error {
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil {
		return hostError("read", dir, err)
	}
	t := tar.NewWriter(w)
	err := t.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: "./", Mode: int64(st.Mode & 0o7777), Uid: int(st.Uid), Gid: int(st.Gid),
		ModTime: time.Unix(st.Mtim.Unix()), Format: tar.FormatPAX})
	if err == nil {
		err = t.Flush()
	}
	return err
}

// sendDir packs a directory of this machine, with top also what it is like
// itself, while send reads it.
func sendDir(ctx context.Context, dir string, top bool, send func(io.Reader) (client.Layer, error)) (client.Layer, error) {
	l, err := files.NewLocal(dir)
	if err != nil {
		return client.Layer{}, err
	}
	defer l.Close()
	r, w := io.Pipe()
	packed := make(chan error, 1)
	go func() {
		var err error
		if top {
			err = packTop(w, dir)
		}
		if err == nil {
			err = l.Download(ctx, "/", w, files.TreeOptions{})
		}
		w.CloseWithError(err)
		packed <- err
	}()
	made, err := send(r)
	r.CloseWithError(io.ErrClosedPipe)
	return made, pipeError(<-packed, err)
}

// progress shows what a server says.
func (b *bar) progress(p client.Progress) {
	b.mu.Lock()
	phase := b.name != p.Phase && p.Phase != ""
	if phase {
		b.name = p.Phase
	}
	lines := b.lines
	b.mu.Unlock()
	if phase && lines != nil {
		fmt.Fprintln(lines, p.Phase)
	}
	b.set(p.Done, p.Total)
}

func showLayer(c *cobra.Command, l client.Layer) error {
	return show(c, l, func(w io.Writer) error {
		_, err := fmt.Fprintln(w, l.Digest)
		return err
	})
}

func layerLs() *cobra.Command {
	return &cobra.Command{
		Use:               "ls",
		Short:             "List all layers",
		Example:           "  dsec layer ls",
		Args:              cobra.NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(c *cobra.Command, _ []string) error {
			return with(c, func(ctx context.Context, cl *client.Client) error {
				all, err := cl.Layers(ctx)
				if err != nil {
					return err
				}
				return showLayers(c, all, "KIND", kind)
			})
		},
	}
}

func kind(l client.Layer) string {
	switch {
	case l.IsTemplate():
		return "template"
	case l.Image:
		return "image"
	case l.Lineage != nil:
		return "disk"
	}
	return "layer"
}

// showLayers prints a list with one column that the caller names.
func showLayers(c *cobra.Command, list []client.Layer, column string, value func(client.Layer) string) error {
	if list == nil {
		list = []client.Layer{} // as JSON: []
	}
	return show(c, list, func(w io.Writer) error {
		rows := make([][]string, 0, len(list))
		for _, l := range list {
			rows = append(rows, []string{strings.Join(l.Tags, ","), shortDigest(string(l.Digest)), size(l.MetaSize + l.DataSize), fmt.Sprint(l.Entries), value(l), l.Source})
		}
		return table(w, "TAGS DIGEST SIZE ENTRIES "+column+" SOURCE", rows)
	})
}

func shortDigest(d string) string {
	if len(d) > 19 {
		return d[:19]
	}
	return d
}

func layerInspect() *cobra.Command {
	return &cobra.Command{
		Use:               "inspect LAYER",
		Short:             "Print all that is known of a layer",
		Example:           "  dsec layer inspect repo:v1",
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: completeImage,
		RunE: func(c *cobra.Command, args []string) error {
			return with(c, func(ctx context.Context, cl *client.Client) error {
				l, err := cl.InspectLayer(ctx, dsec.LayerRef(args[0]))
				if err != nil {
					return err
				}
				return show(c, l, func(w io.Writer) error { return describeLayer(w, l) })
			})
		},
	}
}

func describeLayer(w io.Writer, l client.Layer) error {
	p := page{w: w}
	p.line("digest", string(l.Digest))
	p.line("kind", kind(l))
	p.line("tags", strings.Join(l.Tags, ", "))
	p.line("source", l.Source)
	p.line("size", fmt.Sprintf("%s metadata, %s data, %d entries", size(l.MetaSize), size(l.DataSize), l.Entries))
	if x := l.Lineage; x != nil {
		p.line("packed from", fmt.Sprintf("%s, %s", x.Sandbox, ago(x.Time)))
		for _, d := range x.Parents {
			p.line("stands on", d)
		}
		for _, d := range x.Merged {
			p.line("in place of", d)
		}
		p.line("scrub report", x.Scrub)
	}
	if x := l.Config; x != nil {
		p.line("arch", x.Arch)
		p.line("user", x.User)
		p.line("workdir", x.Workdir)
		p.line("entrypoint", strings.Join(x.Entrypoint, " "))
		p.line("cmd", strings.Join(x.Cmd, " "))
		for _, e := range x.Env {
			p.line("env", e)
		}
	}
	p.describeParts(l)
	return p.err
}

// page prints "name  value" lines and remembers the first error.
type page struct {
	w   io.Writer
	err error
}

func (p *page) line(name, value string) {
	if value == "" || p.err != nil {
		return
	}
	_, p.err = fmt.Fprintf(p.w, "%-12s %s\n", name, safe(value))
}

func (p *page) head(title string) {
	if p.err == nil {
		_, p.err = fmt.Fprintf(p.w, "\n%s\n", title)
	}
}

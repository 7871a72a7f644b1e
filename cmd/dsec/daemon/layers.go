package daemon

import (
	"context"
	"io"
	"math"
	"os"
	"strconv"
	"strings"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/image"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/layer/store"
	"github.com/opendsec/dsec/node/nodeapi"
)

// layers serves a layer store to the API. Layers are named by their content,
// so a repeated call gives the same layer without a table of call ids.
type layers struct {
	store   *store.Store
	spool   string // directory for uploads that must be read twice
	options image.Options
	demand  demand
}

// For implements nodeapi.Layers.
func (l *layers) For(project string) nodeapi.Layers {
	view := *l
	view.store = l.store.View(project)
	return &view
}

// MayTag implements nodeapi.Layers.
func (l *layers) MayTag(_ context.Context, tag dsec.LayerRef) error {
	return l.store.MayTag(string(tag))
}

func (l *layers) Import(ctx context.Context, r nodeapi.Import, progress func(nodeapi.Progress)) (nodeapi.Layer, error) {
	o := l.options
	o.Progress = report(progress)
	if r.Arch != "" {
		o.Platform = "linux/" + r.Arch
	}
	path := r.Source
	if r.Tar != nil {
		var err error
		if path, err = l.spooled(r.Tar); err != nil {
			return nodeapi.Layer{}, err
		}
		defer os.Remove(path)
	}
	loc, err := image.Locate(path)
	if err != nil {
		return nodeapi.Layer{}, err
	}
	loc.Source = r.Source // not where it was spooled
	info, err := l.store.ImportAt(ctx, loc, r.Tag, o)
	if err != nil {
		return nodeapi.Layer{}, err
	}
	return l.Inspect(ctx, dsec.LayerRef(info.Digest))
}

func (l *layers) Build(ctx context.Context, r nodeapi.Build, progress func(nodeapi.Progress)) (nodeapi.Layer, error) {
	owner, err := parseOwner(r.Owner)
	if err != nil {
		return nodeapi.Layer{}, err
	}
	o := l.options
	o.Progress, o.At, o.Owner, o.KeepWhiteouts = report(progress), r.At, owner, true
	if r.Tar != nil {
		info, err := l.store.ImportTar(ctx, store.Tar{R: r.Tar, Name: r.Source}, r.Tag, o)
		if err != nil {
			return nodeapi.Layer{}, err
		}
		return l.Inspect(ctx, dsec.LayerRef(info.Digest))
	}
	info, err := l.store.Import(ctx, r.Source, r.Tag, o)
	if err != nil {
		return nodeapi.Layer{}, err
	}
	return l.Inspect(ctx, dsec.LayerRef(info.Digest))
}

// spooled writes a stream to a file: an archive is read twice.
func (l *layers) spooled(r io.Reader) (path string, err error) {
	f, err := os.CreateTemp(l.spool, "upload-*.tar")
	if err != nil {
		return "", dsec.E(dsec.Internal, "spool upload", l.spool, err)
	}
	_, err = io.Copy(f, r)
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		_ = os.Remove(f.Name())
		return "", dsec.E(dsec.Unavailable, "spool upload", f.Name(), err)
	}
	return f.Name(), nil
}

func (l *layers) List(ctx context.Context) ([]nodeapi.Layer, error) {
	all, err := l.store.List(ctx)
	out := make([]nodeapi.Layer, 0, len(all))
	for _, e := range all {
		out = append(out, nodeapi.Layer{Info: e.Info, Tags: e.Tags})
	}
	return out, err
}

func (l *layers) Inspect(ctx context.Context, ref dsec.LayerRef) (nodeapi.Layer, error) {
	e, err := l.store.Inspect(ctx, ref)
	return nodeapi.Layer{Info: e.Info, Tags: e.Tags}, err
}

func (l *layers) Remove(ctx context.Context, ref dsec.LayerRef) (existed bool, err error) {
	err = l.store.Remove(ctx, ref)
	if dsec.ClassOf(err) == dsec.NotFound {
		return false, nil
	}
	return err == nil, err
}

func (l *layers) Trace(ctx context.Context, ref dsec.LayerRef) (nodeapi.Trace, error) {
	t, files, err := l.store.TracedFiles(ctx, ref)
	if err != nil {
		return nodeapi.Trace{}, err
	}
	e, err := l.store.Inspect(ctx, ref)
	out := nodeapi.Trace{Trace: t, DataSize: e.DataSize}
	for _, f := range files {
		out.Files = append(out.Files, nodeapi.TracedFile(f))
	}
	return out, err
}

func (l *layers) Repack(ctx context.Context, r nodeapi.Repack, progress func(nodeapi.Progress)) (nodeapi.Layer, error) {
	e, err := l.store.Inspect(ctx, r.Ref)
	if err != nil {
		return nodeapi.Layer{}, err
	}
	t, err := l.store.Trace(ctx, e.Digest)
	if err != nil {
		return nodeapi.Layer{}, err
	}
	progress(nodeapi.Progress{Phase: "repack", Total: e.DataSize})
	info, err := l.store.Repack(ctx, dsec.LayerRef(e.Digest), t)
	if err == nil && r.Tag != "" {
		err = l.store.Tag(ctx, r.Tag, info.Digest)
	}
	if err != nil {
		return nodeapi.Layer{}, err
	}
	return l.Inspect(ctx, dsec.LayerRef(info.Digest))
}

func (l *layers) Tag(ctx context.Context, ref, tag dsec.LayerRef) error {
	e, err := l.store.Inspect(ctx, ref)
	if err != nil {
		return err
	}
	return l.store.Tag(ctx, string(tag), e.Digest)
}

func (l *layers) Ensure(ctx context.Context, r nodeapi.Ensure, progress func(layer.Progress)) (nodeapi.Layer, error) {
	o := store.EnsureOptions{MaxAge: r.MaxAge, Image: l.options}
	if r.Arch != "" {
		o.Image.Platform = "linux/" + r.Arch
	}
	info, err := l.store.Ensure(ctx, r.Ref, o, progress)
	if err != nil {
		return nodeapi.Layer{}, err
	}
	return l.Inspect(ctx, dsec.LayerRef(info.Digest))
}

func (l *layers) Template(ctx context.Context, t nodeapi.Template) (nodeapi.Layer, error) {
	info, err := l.store.Bind(ctx, t.Name, store.Template{Image: t.Image, Workspace: t.Workspace, Toolkits: t.Toolkits})
	if err != nil {
		return nodeapi.Layer{}, err
	}
	return l.Inspect(ctx, dsec.LayerRef(info.Digest))
}

func (l *layers) Merge(ctx context.Context, refs []dsec.LayerRef, dry bool) ([]nodeapi.Merged, error) {
	all, err := l.store.MergePrefixes(ctx, refs, dry)
	var out []nodeapi.Merged
	for _, m := range all {
		out = append(out, nodeapi.Merged(m))
	}
	return out, err
}

func (l *layers) Export(ctx context.Context, ref dsec.LayerRef, w io.Writer) error {
	return l.store.Export(ctx, ref, w)
}

func report(fn func(nodeapi.Progress)) func(image.Progress) {
	if fn == nil {
		return nil
	}
	return func(p image.Progress) { fn(nodeapi.Progress{Phase: "convert", Done: p.Bytes}) }
}

// parseOwner reads "uid" or "uid:gid"; "" keeps the source's owners.
func parseOwner(s string) (*image.Owner, error) {
	if s == "" {
		return nil, nil
	}
	u, g, both := strings.Cut(s, ":")
	uid, err := strconv.ParseUint(u, 10, 32)
	gid := uid
	if err == nil && both {
		gid, err = strconv.ParseUint(g, 10, 32)
	}
	if err != nil || uid == math.MaxUint32 || gid == math.MaxUint32 { // which stand for nobody
		return nil, dsec.Errorf(dsec.Invalid, "read owner", dsec.Quote(s), "want uid or uid:gid, as numbers below %d", uint32(math.MaxUint32))
	}
	return &image.Owner{UID: uint32(uid), GID: uint32(gid)}, nil
}

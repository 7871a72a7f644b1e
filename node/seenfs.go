package node

import (
	"context"
	"io"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/files"
)

// seenFS is a file service whose changes are events of the sandbox.
type seenFS struct {
	files.FS
	b *box
}

func (f *seenFS) changed(err error, what, path string) error {
	if err == nil {
		f.b.emit(dsec.Event{Type: dsec.EventFiles, Detail: what + " " + dsec.Quote(path)})
	}
	f.b.touch()
	return f.b.explain(what, err)
}

func (f *seenFS) Write(ctx context.Context, path string, r io.Reader, o files.WriteOptions) (files.Info, error) {
	f.b.use(1)
	defer f.b.use(-1)
	i, err := f.FS.Write(ctx, path, r, o)
	return i, f.changed(err, "write", path)
}

func (f *seenFS) Mkdir(ctx context.Context, path string, mode uint32, parents bool) error {
	return f.changed(f.FS.Mkdir(ctx, path, mode, parents), "mkdir", path)
}

func (f *seenFS) Move(ctx context.Context, from, to string) error {
	return f.changed(f.FS.Move(ctx, from, to), "move", from)
}

func (f *seenFS) Remove(ctx context.Context, path string, recursive bool) error {
	return f.changed(f.FS.Remove(ctx, path, recursive), "remove", path)
}

func (f *seenFS) SetAttr(ctx context.Context, path string, a files.Attr) error {
	return f.changed(f.FS.SetAttr(ctx, path, a), "set attributes", path)
}

func (f *seenFS) Upload(ctx context.Context, dir string, r io.Reader, o files.TreeOptions) error {
	f.b.use(1)
	defer f.b.use(-1)
	return f.changed(f.FS.Upload(ctx, dir, r, o), "upload", dir)
}

func (f *seenFS) Download(ctx context.Context, dir string, w io.Writer, o files.TreeOptions) error {
	f.b.use(1)
	defer f.b.use(-1)
	return f.FS.Download(ctx, dir, w, o)
}

func (f *seenFS) Read(ctx context.Context, path string, offset, length int64, w io.Writer) (int64, error) {
	f.b.use(1)
	defer f.b.use(-1)
	return f.FS.Read(ctx, path, offset, length, w)
}

// Close lets go of the file service, where it can be closed.
func (f *seenFS) Close() error {
	if c, ok := f.FS.(io.Closer); ok {
		return c.Close()
	}
	return nil
}

// watchedFS can watch too.
type watchedFS struct{ *seenFS }

func (f *watchedFS) Watch(ctx context.Context, dir string, recursive bool, fn func(files.Change) error) error {
	f.b.use(1)
	defer f.b.use(-1)
	return f.FS.(files.Watcher).Watch(ctx, dir, recursive, fn)
}

package tier

import (
	"context"
	"io"

	"github.com/opendsec/dsec/files"
)

// FileService is the file service of a sandbox as one user, over all its states. Its errors
// say when it is the sandbox that is gone.
type FileService struct {
	Explain func(error) error                               // says of an error when it is the sandbox that is gone
	Open    func(context.Context) (*files.Redialing, error) // the connection in the state that it has now
}

var _ interface {
	files.FS
	files.Watcher
} = (*FileService)(nil)

// with runs a call on the connection.
func (s *FileService) with(ctx context.Context, call func(fs *files.Redialing) error) error {
	fs, err := s.Open(ctx)
	if err == nil {
		err = call(fs)
	}
	return s.Explain(err)
}

// Stat is files.FS's.
func (s *FileService) Stat(ctx context.Context, path string, follow bool) (i files.Info, err error) {
	err = s.with(ctx, func(fs *files.Redialing) error { i, err = fs.Stat(ctx, path, follow); return err })
	return i, err
}

// List is files.FS's.
func (s *FileService) List(ctx context.Context, path string, depth int) (all []files.Info, err error) {
	err = s.with(ctx, func(fs *files.Redialing) error { all, err = fs.List(ctx, path, depth); return err })
	return all, err
}

// Read is files.FS's.
func (s *FileService) Read(ctx context.Context, path string, offset, length int64, w io.Writer) (n int64, err error) {
	err = s.with(ctx, func(fs *files.Redialing) error { n, err = fs.Read(ctx, path, offset, length, w); return err })
	return n, err
}

// Write is files.FS's.
func (s *FileService) Write(ctx context.Context, path string, r io.Reader, o files.WriteOptions) (i files.Info, err error) {
	err = s.with(ctx, func(fs *files.Redialing) error { i, err = fs.Write(ctx, path, r, o); return err })
	return i, err
}

// Mkdir is files.FS's.
func (s *FileService) Mkdir(ctx context.Context, path string, mode uint32, parents bool) error {
	return s.with(ctx, func(fs *files.Redialing) error { return fs.Mkdir(ctx, path, mode, parents) })
}

// Move is files.FS's.
func (s *FileService) Move(ctx context.Context, from, to string) error {
	return s.with(ctx, func(fs *files.Redialing) error { return fs.Move(ctx, from, to) })
}

// Remove is files.FS's.
func (s *FileService) Remove(ctx context.Context, path string, recursive bool) error {
	return s.with(ctx, func(fs *files.Redialing) error { return fs.Remove(ctx, path, recursive) })
}

// SetAttr is files.FS's.
func (s *FileService) SetAttr(ctx context.Context, path string, a files.Attr) error {
	return s.with(ctx, func(fs *files.Redialing) error { return fs.SetAttr(ctx, path, a) })
}

// Download is files.FS's.
func (s *FileService) Download(ctx context.Context, dir string, w io.Writer, o files.TreeOptions) error {
	return s.with(ctx, func(fs *files.Redialing) error { return fs.Download(ctx, dir, w, o) })
}

// Upload is files.FS's.
func (s *FileService) Upload(ctx context.Context, dir string, r io.Reader, o files.TreeOptions) error {
	return s.with(ctx, func(fs *files.Redialing) error { return fs.Upload(ctx, dir, r, o) })
}

// Watch is files.Watcher's.
func (s *FileService) Watch(ctx context.Context, dir string, recursive bool, fn func(files.Change) error) error {
	return s.with(ctx, func(fs *files.Redialing) error { return fs.Watch(ctx, dir, recursive, fn) })
}

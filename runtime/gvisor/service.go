package gvisor

import (
	"context"
	"errors"
	"io"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/files"
	"github.com/opendsec/dsec/internal/accounts"
)

// fileService is the file service of a sandbox as one user, over all its
// states. Its errors say when it is the sandbox that is gone.
type fileService struct {
	r   *Runtime
	sb  *sandbox
	who accounts.Identity // as it was when the service was opened
	key string            // of who
}

var _ interface {
	files.FS
	files.Watcher
} = (*fileService)(nil)

// with runs a call on the connection.
func (s *fileService) with(call func(fs *files.Redialing) error) error {
	if s.sb.isPaused() { // who serves stands still, too
		return dsec.Errorf(dsec.IllegalState, "reach files of sandbox", string(s.sb.id), "the sandbox is paused, and behind gvisor its files with it")
	}
	fs, err := s.open()
	if err == nil {
		err = call(fs)
	}
	if err != nil && s.sb.gone() && (errors.Is(err, dsec.Unavailable.Err()) || errors.Is(err, dsec.NotFound.Err())) {
		return dsec.E(dsec.SandboxGone, "reach files of sandbox", string(s.sb.id), err)
	}
	return err
}

func (s *fileService) Stat(ctx context.Context, path string, follow bool) (i files.Info, err error) {
	err = s.with(func(fs *files.Redialing) error { i, err = fs.Stat(ctx, path, follow); return err })
	return i, err
}

func (s *fileService) List(ctx context.Context, path string, depth int) (all []files.Info, err error) {
	err = s.with(func(fs *files.Redialing) error { all, err = fs.List(ctx, path, depth); return err })
	return all, err
}

func (s *fileService) Read(ctx context.Context, path string, offset, length int64, w io.Writer) (n int64, err error) {
	err = s.with(func(fs *files.Redialing) error { n, err = fs.Read(ctx, path, offset, length, w); return err })
	return n, err
}

func (s *fileService) Write(ctx context.Context, path string, r io.Reader, o files.WriteOptions) (i files.Info, err error) {
	err = s.with(func(fs *files.Redialing) error { i, err = fs.Write(ctx, path, r, o); return err })
	return i, err
}

func (s *fileService) Mkdir(ctx context.Context, path string, mode uint32, parents bool) error {
	return s.with(func(fs *files.Redialing) error { return fs.Mkdir(ctx, path, mode, parents) })
}

func (s *fileService) Move(ctx context.Context, from, to string) error {
	return s.with(func(fs *files.Redialing) error { return fs.Move(ctx, from, to) })
}

func (s *fileService) Remove(ctx context.Context, path string, recursive bool) error {
	return s.with(func(fs *files.Redialing) error { return fs.Remove(ctx, path, recursive) })
}

func (s *fileService) SetAttr(ctx context.Context, path string, a files.Attr) error {
	return s.with(func(fs *files.Redialing) error { return fs.SetAttr(ctx, path, a) })
}

func (s *fileService) Download(ctx context.Context, dir string, w io.Writer, o files.TreeOptions) error {
	return s.with(func(fs *files.Redialing) error { return fs.Download(ctx, dir, w, o) })
}

func (s *fileService) Upload(ctx context.Context, dir string, r io.Reader, o files.TreeOptions) error {
	return s.with(func(fs *files.Redialing) error { return fs.Upload(ctx, dir, r, o) })
}

func (s *fileService) Watch(ctx context.Context, dir string, recursive bool, fn func(files.Change) error) error {
	return s.with(func(fs *files.Redialing) error { return fs.Watch(ctx, dir, recursive, fn) })
}

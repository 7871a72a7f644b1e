package guesttest

import (
	"context"
	"io"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/files"
	"github.com/opendsec/dsec/process"
)

// command says when it is its sandbox that is gone.
type command struct {
	process.Process
	b *box
}

func (c *command) Follow(ctx context.Context, s process.Stream, offset int64) (process.Reader, error) {
	r, err := c.Process.Follow(ctx, s, offset)
	if err != nil {
		return nil, c.b.translate("follow", err)
	}
	return &reader{r, c.b}, nil
}

type reader struct {
	process.Reader
	b *box
}

func (r *reader) Next(ctx context.Context) (process.Chunk, error) {
	c, err := r.Reader.Next(ctx)
	return c, r.b.translate("follow", err)
}

func (c *command) Kept(ctx context.Context, s process.Stream) (head, tail []byte, off int64, err error) {
	head, tail, off, err = c.Process.Kept(ctx, s)
	return head, tail, off, c.b.translate("read output", err)
}

func (c *command) Write(ctx context.Context, p []byte) (int, error) {
	n, err := c.Process.Write(ctx, p)
	return n, c.b.translate("write", err)
}

// Wait reports the end of a command whose sandbox is being removed as its.
func (c *command) Wait(ctx context.Context) (process.Result, error) {
	r, err := c.Process.Wait(ctx)
	c.b.mu.Lock()
	removed := c.b.removed
	c.b.mu.Unlock()
	if err == nil && r.Status == process.Killed && removed {
		return r, dsec.E(dsec.SandboxGone, "wait for command", string(c.b.id), nil)
	}
	return r, c.b.translate("wait for command", err)
}

// service is a file service likewise.
type service struct {
	fs files.FS
	b  *box
}

func (s *service) Stat(ctx context.Context, path string, follow bool) (files.Info, error) {
	v, err := s.fs.Stat(ctx, path, follow)
	return v, s.b.translate("use files", err)
}

func (s *service) List(ctx context.Context, path string, depth int) ([]files.Info, error) {
	v, err := s.fs.List(ctx, path, depth)
	return v, s.b.translate("use files", err)
}

func (s *service) Read(ctx context.Context, path string, offset, length int64, w io.Writer) (int64, error) {
	v, err := s.fs.Read(ctx, path, offset, length, w)
	return v, s.b.translate("use files", err)
}

func (s *service) Write(ctx context.Context, path string, r io.Reader, o files.WriteOptions) (files.Info, error) {
	v, err := s.fs.Write(ctx, path, r, o)
	return v, s.b.translate("use files", err)
}

func (s *service) Mkdir(ctx context.Context, path string, mode uint32, parents bool) error {
	return s.b.translate("use files", s.fs.Mkdir(ctx, path, mode, parents))
}

func (s *service) Move(ctx context.Context, from, to string) error {
	return s.b.translate("use files", s.fs.Move(ctx, from, to))
}

func (s *service) Remove(ctx context.Context, path string, recursive bool) error {
	return s.b.translate("use files", s.fs.Remove(ctx, path, recursive))
}

func (s *service) SetAttr(ctx context.Context, path string, a files.Attr) error {
	return s.b.translate("use files", s.fs.SetAttr(ctx, path, a))
}

func (s *service) Download(ctx context.Context, dir string, w io.Writer, o files.TreeOptions) error {
	return s.b.translate("use files", s.fs.Download(ctx, dir, w, o))
}

func (s *service) Upload(ctx context.Context, dir string, r io.Reader, o files.TreeOptions) error {
	return s.b.translate("use files", s.fs.Upload(ctx, dir, r, o))
}

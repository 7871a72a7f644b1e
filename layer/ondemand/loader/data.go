package loader

import (
	"context"
	"os"
)

// data are those of a layer: an ondemand.Layer, or whole.
type data interface {
	Size() int64
	ReadAt(ctx context.Context, p []byte, off int64) (int, error)
	Ensure(ctx context.Context, off, n int64) error
	Sync() error
	Close() error
}

// whole is the file of data that were all here when it was handed over: who has
// the layer mounted has it still, and may wait for an answer of a loader before
// this one.
type whole struct {
	f    *os.File
	size int64
}

func (w whole) Size() int64 { return w.size }

func (w whole) ReadAt(_ context.Context, p []byte, off int64) (int, error) {
	n := min(int64(len(p)), w.size-off)
	if n <= 0 {
		return 0, nil
	}
	return w.f.ReadAt(p[:n], off)
}

func (whole) Ensure(context.Context, int64, int64) error { return nil }
func (whole) Sync() error                                { return nil }
func (w whole) Close() error                             { return w.f.Close() }

// reader is what both mechanisms read a layer through: it tells the agent of what
// failed.
type reader struct {
	data
	s       *Server
	x       *served
	session string // "" by events: all who have the layer read one file
}

func (s *Server) reader(x *served, session string) reader {
	return reader{data: x.data, s: s, x: x, session: session}
}

func (r reader) ReadAt(ctx context.Context, p []byte, off int64) (int, error) {
	n, err := r.data.ReadAt(ctx, p, off)
	r.s.failed(ctx, r.x, r.session, err)
	return n, err
}

func (r reader) Ensure(ctx context.Context, off, n int64) error {
	err := r.data.Ensure(ctx, off, n)
	r.s.failed(ctx, r.x, r.session, err)
	return err
}

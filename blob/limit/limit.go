// Package limit is a blob.Store with a bound on the calls at one time. An
// object being read counts until it is closed.
package limit

import (
	"context"
	"io"
	"sync"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob"
)

type store struct {
	blob.Store
	slots chan struct{}
}

// New decorates a store; n is the number of calls at one time.
func New(s blob.Store, n int) blob.Store {
	return &store{s, make(chan struct{}, max(1, n))}
}

func (s *store) acquire(ctx context.Context, op, key string) error {
	select {
	case s.slots <- struct{}{}:
		return nil
	case <-ctx.Done():
		return dsec.E(dsec.ClassOf(ctx.Err()), op, key, ctx.Err())
	}
}

func (s *store) release() { <-s.slots }

func (s *store) Open(ctx context.Context, key string, off, n int64) (io.ReadCloser, error) {
	if err := s.acquire(ctx, "read object", key); err != nil {
		return nil, err
	}
	r, err := s.Store.Open(ctx, key, off, n)
	if err != nil {
		s.release()
		return nil, err
	}
	return &reader{ReadCloser: r, done: sync.OnceFunc(s.release)}, nil
}

type reader struct {
	io.ReadCloser
	done func()
}

func (r *reader) Close() error {
	defer r.done()
	return r.ReadCloser.Close()
}

func (s *store) Put(ctx context.Context, key string, r io.Reader, o blob.PutOptions) error {
	if err := s.acquire(ctx, "write object", key); err != nil {
		return err
	}
	defer s.release()
	return s.Store.Put(ctx, key, r, o)
}

func (s *store) Stat(ctx context.Context, key string) (blob.Info, error) {
	if err := s.acquire(ctx, "stat object", key); err != nil {
		return blob.Info{}, err
	}
	defer s.release()
	return s.Store.Stat(ctx, key)
}

func (s *store) Delete(ctx context.Context, key string) error {
	if err := s.acquire(ctx, "delete object", key); err != nil {
		return err
	}
	defer s.release()
	return s.Store.Delete(ctx, key)
}

// Package stall is a blob.Store that gives up what does not move: a call that is
// not answered, or a body of which nothing comes, for longer than it may. The
// error is Unavailable, so that it is tried again; the context of the call is
// cancelled, and what was waiting ends as the contract promises.
//
// Time in which the caller does not read, or does not give what is to be
// written, does not count.
package stall

import (
	"context"
	"fmt"
	"io"
	"iter"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob"
)

// Limits say how long nothing may happen; zero values are the defaults.
type Limits struct {
	Read  time.Duration // for an answer, and for each piece of a body; default 10 s
	Write time.Duration // for the store to ask for more of a body, or to answer; default 1 min, because it may hold 32 MiB that are on their way
}

type store struct {
	blob.Store
	l Limits
}

// New decorates a store.
func New(s blob.Store, l Limits) blob.Store {
	if l.Read == 0 {
		l.Read = 10 * time.Second
	}
	if l.Write == 0 {
		l.Write = time.Minute
	}
	return &store{s, l}
}

// watch is a context that ends when its owner does not stop the clock in time.
type watch struct {
	ctx    context.Context
	cancel context.CancelFunc
	limit  time.Duration
	clock  *time.Timer
	why    error
}

func newWatch(ctx context.Context, limit time.Duration) *watch {
	w := &watch{limit: limit, why: fmt.Errorf("nothing came for %v", limit)}
	ctx, cancel := context.WithCancelCause(ctx)
	w.ctx, w.cancel = ctx, func() { w.clock.Stop(); cancel(nil) }
	w.clock = time.AfterFunc(limit, func() { cancel(w.why) })
	return w
}

func (w *watch) pause()  { w.clock.Stop() }
func (w *watch) resume() { w.clock.Reset(w.limit) }

// explain is err, unless it came because we gave up.
func (w *watch) explain(op, key string, err error) error {
	if err == nil || err == io.EOF || context.Cause(w.ctx) != w.why {
		return err
	}
	return dsec.E(dsec.Unavailable, op, key, w.why)
}

func (s *store) Open(ctx context.Context, key string, off, n int64) (io.ReadCloser, error) {
	w := newWatch(ctx, s.l.Read)
	r, err := s.Store.Open(w.ctx, key, off, n)
	w.pause()
	if err != nil {
		w.cancel()
		return nil, w.explain("read object", key, err)
	}
	return &reader{r, w, key}, nil
}

type reader struct {
	r   io.ReadCloser
	w   *watch
	key string
}

func (r *reader) Read(p []byte) (int, error) {
	r.w.resume()
	n, err := r.r.Read(p)
	r.w.pause()
	return n, r.w.explain("read object", r.key, err)
}

func (r *reader) Close() error {
	defer r.w.cancel()
	return r.r.Close()
}

func (s *store) Put(ctx context.Context, key string, r io.Reader, o blob.PutOptions) error {
	w := newWatch(ctx, s.l.Write)
	defer w.cancel()
	var body io.Reader = &fed{r, w}
	if seeker, ok := r.(io.Seeker); ok { // whoever writes in parts wants to know the size
		body = struct {
			io.Reader
			io.Seeker
		}{body, seeker}
	}
	return w.explain("write object", key, s.Store.Put(w.ctx, key, body, o))
}

// fed is a body of which the store asks for more.
type fed struct {
	r io.Reader
	w *watch
}

func (f *fed) Read(p []byte) (int, error) {
	f.w.pause()
	n, err := f.r.Read(p)
	f.w.resume()
	return n, err
}

func (s *store) Stat(ctx context.Context, key string) (blob.Info, error) {
	w := newWatch(ctx, s.l.Read)
	defer w.cancel()
	i, err := s.Store.Stat(w.ctx, key)
	return i, w.explain("stat object", key, err)
}

func (s *store) Delete(ctx context.Context, key string) error {
	w := newWatch(ctx, s.l.Read)
	defer w.cancel()
	return w.explain("delete object", key, s.Store.Delete(w.ctx, key))
}

func (s *store) List(ctx context.Context, prefix string) iter.Seq2[blob.Info, error] {
	return func(yield func(blob.Info, error) bool) {
		w := newWatch(ctx, s.l.Read)
		defer w.cancel()
		for i, err := range s.Store.List(w.ctx, prefix) {
			w.pause()
			if !yield(i, w.explain("list objects", prefix, err)) {
				return
			}
			w.resume()
		}
	}
}

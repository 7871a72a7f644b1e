// Package limit is a blob.Store with a bound on the requests at one time and on
// the bytes of a second. A Limiter belongs to a host: all stores on it share it.
//
// Who waits longest is next, both for a place and for bytes; a request takes at
// most a tenth of a second's bytes at once, so that a large object does not keep
// small ones waiting. An object that is read has its place until it is closed:
// who opens a second one before it closes the first needs two.
package limit

import (
	"context"
	"io"
	"iter"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/semaphore"
	"golang.org/x/time/rate"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob"
)

// Limits of one host.
type Limits struct {
	Requests  int   // at one time; default 64
	Bandwidth int64 // bytes a second, read and written together; 0: no limit
}

// Stats are counted from the start of a Limiter.
type Stats struct {
	Waits     int64         // requests that had to wait for a place
	Waited    time.Duration // by all of them
	Throttled time.Duration // waited for bytes
}

// Limiter is shared by who uses one host.
type Limiter struct {
	places *semaphore.Weighted
	bytes  *rate.Limiter // nil: no limit

	waits, waited, throttled atomic.Int64
}

// leastPiece is what is read at once however little a second may have.
const leastPiece = 4 << 10

// NewLimiter makes one.
func NewLimiter(l Limits) *Limiter {
	if l.Requests == 0 {
		l.Requests = 64
	}
	out := &Limiter{places: semaphore.NewWeighted(int64(max(1, l.Requests)))}
	if l.Bandwidth > 0 {
		out.bytes = rate.NewLimiter(rate.Limit(l.Bandwidth), int(max(leastPiece, min(l.Bandwidth/10, 1<<30))))
	}
	return out
}

// Stats so far.
func (l *Limiter) Stats() Stats {
	return Stats{l.waits.Load(), time.Duration(l.waited.Load()), time.Duration(l.throttled.Load())}
}

// Try takes a place if one is free and nobody waits for it.
func (l *Limiter) Try() (release func(), ok bool) {
	if !l.places.TryAcquire(1) {
		return nil, false
	}
	return l.release(), true
}

func (l *Limiter) release() func() {
	return sync.OnceFunc(func() { l.places.Release(1) })
}

func (l *Limiter) acquire(ctx context.Context, op, key string) (release func(), err error) {
	if ctx.Err() == nil {
		if release, ok := l.Try(); ok {
			return release, nil
		}
		began := time.Now()
		l.waits.Add(1)
		err = l.places.Acquire(ctx, 1)
		l.waited.Add(int64(time.Since(began)))
		if err == nil {
			return l.release(), nil
		}
	}
	return nil, dsec.E(dsec.ClassOf(ctx.Err()), op, key, ctx.Err())
}

// body is content whose bytes are counted.
type body struct {
	r   io.Reader
	l   *Limiter
	ctx context.Context
	op  string
	key string
}

func (b *body) Read(p []byte) (int, error) {
	if b.l.bytes == nil {
		return b.r.Read(p)
	}
	if most := b.l.bytes.Burst(); len(p) > most {
		p = p[:most]
	}
	n, err := b.r.Read(p)
	if n == 0 {
		return n, err
	}
	began := time.Now()
	if werr := b.l.bytes.WaitN(b.ctx, n); werr != nil {
		class := dsec.Timeout // the bytes would come after the deadline
		if b.ctx.Err() != nil {
			class = dsec.ClassOf(b.ctx.Err())
		}
		return n, dsec.E(class, b.op, b.key, werr)
	}
	b.l.throttled.Add(int64(time.Since(began)))
	return n, err
}

type store struct {
	blob.Store
	l *Limiter
}

// New decorates a store.
func New(s blob.Store, l *Limiter) blob.Store { return &store{s, l} }

func (s *store) Open(ctx context.Context, key string, off, n int64) (io.ReadCloser, error) {
	const op = "read object"
	release, err := s.l.acquire(ctx, op, key)
	if err != nil {
		return nil, err
	}
	r, err := s.Store.Open(ctx, key, off, n)
	if err != nil {
		release()
		return nil, err
	}
	return &reader{&body{r, s.l, ctx, op, key}, r, release}, nil
}

type reader struct {
	io.Reader
	r    io.Closer
	done func()
}

func (r *reader) Close() error {
	defer r.done()
	return r.r.Close()
}

func (s *store) Put(ctx context.Context, key string, r io.Reader, o blob.PutOptions) error {
	const op = "write object"
	release, err := s.l.acquire(ctx, op, key)
	if err != nil {
		return err
	}
	defer release()
	var b io.Reader = &body{r, s.l, ctx, op, key}
	if seeker, ok := r.(io.Seeker); ok {
		b = struct {
			io.Reader
			io.Seeker
		}{b, seeker}
	}
	return s.Store.Put(ctx, key, b, o)
}

func (s *store) Stat(ctx context.Context, key string) (blob.Info, error) {
	release, err := s.l.acquire(ctx, "stat object", key)
	if err != nil {
		return blob.Info{}, err
	}
	defer release()
	return s.Store.Stat(ctx, key)
}

func (s *store) Delete(ctx context.Context, key string) error {
	release, err := s.l.acquire(ctx, "delete object", key)
	if err != nil {
		return err
	}
	defer release()
	return s.Store.Delete(ctx, key)
}

// List has a place only while the store works, and none while the caller does:
// it may want to delete what it sees.
func (s *store) List(ctx context.Context, prefix string) iter.Seq2[blob.Info, error] {
	return func(yield func(blob.Info, error) bool) {
		next, stop := iter.Pull2(s.Store.List(ctx, prefix))
		defer stop()
		for {
			release, err := s.l.acquire(ctx, "list objects", prefix)
			if err != nil {
				yield(blob.Info{}, err)
				return
			}
			i, err, ok := next()
			release()
			if !ok || !yield(i, err) {
				return
			}
		}
	}
}

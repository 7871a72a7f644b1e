// Package retry is a blob.Store that tries again what failed because something
// was away (class Unavailable), after growing, jittered waits.
//
// A read that breaks off is resumed at the byte it had reached, so that none
// comes twice and none is left out; it is given up when it breaks off too often
// without a byte in between. A listing is resumed behind its last key. A Put is
// tried again only if its body can be read again, which is to say if it is an
// io.Seeker. With IfAbsent, a try whose answer was lost may have written: the
// next one then says AlreadyExists, as it does if it was a stranger. Only the
// caller can tell them apart, so it is not hidden.
//
// An object that is replaced while a read of it is resumed gives bytes of both:
// what is replaced has to be verified by who reads it.
//
// Nothing is waited for that the context leaves no time for.
package retry

import (
	"context"
	"errors"
	"io"
	"iter"
	"math/rand/v2"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob"
	"github.com/opendsec/dsec/internal/within"
)

// Policy says how often and how long; zero values are the defaults.
type Policy struct {
	Tries   int            // default 4
	First   time.Duration  // most that is waited before the second try; doubles; default 200 ms
	Most    time.Duration  // most that is waited; default 5 s
	Retried func(error)    // is told each error that is not the last; nil: nobody
	jitter  func() float64 // 0 to 1
	wait    func(context.Context, time.Duration) error
}

type store struct {
	blob.Store
	p Policy
}

// New decorates a store.
func New(s blob.Store, p Policy) blob.Store {
	if p.Tries == 0 {
		p.Tries = 4
	}
	if p.First == 0 {
		p.First = 200 * time.Millisecond
	}
	if p.Most == 0 {
		p.Most = 5 * time.Second
	}
	if p.Retried == nil {
		p.Retried = func(error) {}
	}
	if p.jitter == nil {
		p.jitter = rand.Float64
	}
	if p.wait == nil {
		p.wait = within.Sleep
	}
	return &store{s, p}
}

// patience is what is left of it for one call.
type patience struct {
	p     Policy
	tried int
}

// again waits before another try, if err is worth one. Else it returns what the
// caller is to be told.
func (q *patience) again(ctx context.Context, err error) error {
	q.tried++
	if err == nil || dsec.ClassOf(err) != dsec.Unavailable || q.tried >= q.p.Tries {
		return err
	}
	d := q.delay()
	if until, ok := ctx.Deadline(); ok && time.Until(until) < d {
		return err
	}
	if q.p.wait(ctx, d) != nil {
		e, _ := errors.AsType[*dsec.Error](err)
		return dsec.E(dsec.ClassOf(ctx.Err()), e.Op, e.Object, e.Err)
	}
	q.p.Retried(err)
	return nil
}

// delay is half of what it may be, and a random part of the other half.
func (q *patience) delay() time.Duration {
	d := q.p.First
	for i := 1; i < q.tried && d < q.p.Most; i++ {
		d *= 2
	}
	d = min(d, q.p.Most)
	return d/2 + time.Duration(q.p.jitter()*float64(d/2))
}

func (s *store) patience() *patience { return &patience{p: s.p} }

// do runs a call until it succeeds, fails for good, or was tried enough.
func (s *store) do(ctx context.Context, call func() error) error {
	q := s.patience()
	for {
		err := call()
		if err == nil {
			return nil
		}
		if err := q.again(ctx, err); err != nil {
			return err
		}
	}
}

func (s *store) Open(ctx context.Context, key string, off, n int64) (io.ReadCloser, error) {
	r := &reader{s: s, ctx: ctx, key: key, off: off, n: n, q: s.patience()}
	for {
		err := r.open()
		if err == nil {
			return r, nil
		}
		if err := r.q.again(ctx, err); err != nil {
			return nil, err
		}
	}
}

// reader opens the object again when it breaks.
type reader struct {
	s      *store
	ctx    context.Context // of Open, which bounds the reading
	key    string
	off, n int64 // what is still to come
	q      *patience
	r      io.ReadCloser // nil: broken
	broken error         // comes after the bytes that came with it
}

func (r *reader) open() (err error) {
	r.r, err = r.s.Store.Open(r.ctx, r.key, r.off, r.n)
	if err != nil {
		r.r = nil
	}
	return err
}

func (r *reader) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	for {
		if r.broken != nil {
			if err := r.mend(); err != nil {
				return 0, err
			}
		}
		n, err := r.r.Read(p)
		if n > 0 {
			r.off += int64(n)
			if r.n >= 0 {
				r.n -= int64(n)
			}
			r.q = r.s.patience()
		}
		if dsec.ClassOf(err) != dsec.Unavailable {
			return n, err
		}
		r.broken = err
		if n > 0 {
			return n, nil
		}
	}
}

// mend opens again. The broken one is closed first: it may hold what the next
// one needs.
func (r *reader) mend() error {
	err := r.broken
	for {
		r.close()
		if r.n == 0 { // nothing was missing
			return io.EOF
		}
		if err := r.q.again(r.ctx, err); err != nil {
			return err
		}
		if err = r.open(); err == nil {
			r.broken = nil
			return nil
		}
	}
}

func (r *reader) close() {
	if r.r != nil {
		r.r.Close()
		r.r = nil
	}
}

// Close closes what is open; one that broke was closed with its error.
func (r *reader) Close() error {
	if r.r == nil {
		return nil
	}
	err := r.r.Close()
	r.r, r.broken, r.n = nil, io.ErrClosedPipe, -1
	return err
}

func (s *store) Put(ctx context.Context, key string, body io.Reader, o blob.PutOptions) error {
	seeker, ok := body.(io.Seeker)
	if !ok {
		return s.Store.Put(ctx, key, body, o)
	}
	start, err := seeker.Seek(0, io.SeekCurrent)
	if err != nil {
		return s.Store.Put(ctx, key, body, o)
	}
	return s.do(ctx, func() error {
		if _, err := seeker.Seek(start, io.SeekStart); err != nil {
			return dsec.E(dsec.Internal, "write object", key, err)
		}
		return s.Store.Put(ctx, key, body, o)
	})
}

func (s *store) Stat(ctx context.Context, key string) (i blob.Info, err error) {
	err = s.do(ctx, func() error {
		i, err = s.Store.Stat(ctx, key)
		return err
	})
	return i, err
}

func (s *store) Delete(ctx context.Context, key string) error {
	return s.do(ctx, func() error { return s.Store.Delete(ctx, key) })
}

func (s *store) List(ctx context.Context, prefix string) iter.Seq2[blob.Info, error] {
	return func(yield func(blob.Info, error) bool) {
		q, last := s.patience(), ""
		for {
			var broken error
			for i, err := range s.Store.List(ctx, prefix) {
				if err != nil {
					broken = err
					break
				}
				if i.Key <= last { // was there before it broke
					continue
				}
				last, q = i.Key, s.patience()
				if !yield(i, nil) {
					return
				}
			}
			if broken == nil {
				return
			}
			if err := q.again(ctx, broken); err != nil {
				yield(blob.Info{}, err)
				return
			}
		}
	}
}

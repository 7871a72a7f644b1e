// Package retry is a blob.Store that tries again what failed because something
// was away: with growing, jittered waits, and for a Put only if its content can
// be read again. Reading is resumed where it broke off.
package retry

import (
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob"
)

// Policy says how often and how long; zero values are the defaults.
type Policy struct {
	Tries int           // default 4
	First time.Duration // wait before the second try; doubles; default 200 ms
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
	return &store{s, p}
}

// do runs a call until it succeeds, fails for good, or was tried enough.
func (s *store) do(ctx context.Context, call func() error) error {
	wait := s.p.First
	for try := 1; ; try++ {
		err := call()
		if dsec.ClassOf(err) != dsec.Unavailable || try == s.p.Tries {
			return err
		}
		t := time.NewTimer(wait/2 + rand.N(wait))
		select {
		case <-t.C:
			wait *= 2
		case <-ctx.Done():
			t.Stop()
			return err
		}
	}
}

func (s *store) Open(ctx context.Context, key string, off, n int64) (r io.ReadCloser, err error) {
	err = s.do(ctx, func() error {
		r, err = s.Store.Open(ctx, key, off, n)
		return err
	})
	if err != nil {
		return nil, err
	}
	return &reader{r, s, ctx, key, off, n, 0}, nil
}

// reader opens the object again when it breaks.
type reader struct {
	io.ReadCloser
	s      *store
	ctx    context.Context // of Open, which bounds the reading
	key    string
	off, n int64
	broken int
}

func (r *reader) Read(p []byte) (int, error) {
	n, err := r.ReadCloser.Read(p)
	r.off += int64(n)
	if r.n >= 0 {
		r.n -= int64(n)
	}
	if dsec.ClassOf(err) != dsec.Unavailable {
		return n, err
	}
	if r.broken++; r.broken >= r.s.p.Tries {
		return n, err
	}
	again, openErr := r.s.Open(r.ctx, r.key, r.off, r.n)
	if openErr != nil {
		return n, errors.Join(err, openErr)
	}
	r.ReadCloser.Close()
	r.ReadCloser = again
	return n, nil
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
	// A try whose answer was lost may have written: with IfAbsent the next one
	// then says AlreadyExists, as it does if it was a stranger. Only the caller
	// can tell them apart, so it is not hidden.
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

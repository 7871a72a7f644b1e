// Package fault breaks object storage on purpose, for tests and benchmarks. The
// same Faults work on a store that is decorated (Store) and in front of a real
// server (blob/s3test), so that files and S3 are tested alike.
//
// Faults may be set while calls run; those that have begun keep what was set
// when they began.
package fault

import (
	"context"
	"errors"
	"io"
	"iter"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/time/rate"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob"
	"github.com/opendsec/dsec/internal/within"
)

// Mode is how requests go wrong.
type Mode string

// The modes.
const (
	None        Mode = ""
	Refuse      Mode = "refuse"      // nobody listens
	Hang        Mode = "hang"        // no answer, ever
	Stall       Mode = "stall"       // a body stops in its middle
	Cut         Mode = "cut"         // a body ends in its middle, with an error
	Forbidden   Mode = "forbidden"   // 403
	Missing     Mode = "missing"     // 404
	Throttled   Mode = "throttled"   // 429
	Unavailable Mode = "unavailable" // 503
	Corrupt     Mode = "corrupt"     // bodies that are read have wrong bytes
)

// Modes lists every one but None.
var Modes = []Mode{Refuse, Hang, Stall, Cut, Forbidden, Missing, Throttled, Unavailable, Corrupt}

// Faults is what is wrong. The zero value is nothing.
type Faults struct {
	Mode      Mode
	Latency   time.Duration // before each answer
	Bandwidth int64         // bytes a second of all bodies together; 0: no limit
	// Match says which requests the mode is for; nil: all. Refuse knows no
	// requests and ignores it, and the latency and bandwidth are for all.
	Match func(Request) bool
}

// Request is what Match is asked about.
type Request struct {
	Op  string // "open", "put", "stat", "delete", "list"; of a server the HTTP method
	Key string // of a server the path
	N   int64  // how many requests there were before
}

// Limiter is the bandwidth as a rate; nil if there is none.
func (f Faults) Limiter() *rate.Limiter {
	if f.Bandwidth <= 0 {
		return nil
	}
	return rate.NewLimiter(rate.Limit(f.Bandwidth), int(max(1, min(f.Bandwidth/10, 1<<20))))
}

// Broken is the mode for one request.
func (f Faults) Broken(r Request) Mode {
	if f.Mode == Refuse || f.Match == nil || f.Match(r) {
		return f.Mode
	}
	return None
}

// Store decorates a store; Set changes what is wrong.
type Store struct {
	blob.Store
	now   atomic.Pointer[state]
	count atomic.Int64
}

type state struct {
	Faults
	limit *rate.Limiter
}

// New decorates a store that works.
func New(s blob.Store) *Store {
	f := &Store{Store: s}
	f.Set(Faults{})
	return f
}

// Set makes everything that begins from now on go wrong like this.
func (s *Store) Set(f Faults) { s.now.Store(&state{f, f.Limiter()}) }

// Requests is how many calls have begun.
func (s *Store) Requests() int64 { return s.count.Load() }

// begin waits and fails as a request does.
func (s *Store) begin(ctx context.Context, op, verb, key string) (*state, Mode, error) {
	st := s.now.Load()
	mode := st.Broken(Request{Op: op, Key: key, N: s.count.Add(1) - 1})
	fail := func(c dsec.Class, err error) (*state, Mode, error) { return st, mode, dsec.E(c, verb, key, err) }
	if mode == Refuse {
		return fail(dsec.Unavailable, syscall.ECONNREFUSED)
	}
	if mode == Hang {
		<-ctx.Done()
	} else if err := within.Sleep(ctx, st.Latency); err == nil {
		switch mode {
		case Forbidden:
			return fail(dsec.PermissionDenied, syscall.EACCES)
		case Missing:
			return fail(dsec.NotFound, syscall.ENOENT)
		case Throttled, Unavailable:
			return fail(dsec.Unavailable, syscall.EAGAIN)
		}
		return st, mode, nil
	}
	return fail(dsec.ClassOf(ctx.Err()), ctx.Err())
}

// Open breaks bodies in the middle of what was asked for.
func (s *Store) Open(ctx context.Context, key string, off, n int64) (io.ReadCloser, error) {
	st, mode, err := s.begin(ctx, "open", "read object", key)
	if err != nil {
		return nil, err
	}
	r, err := s.Store.Open(ctx, key, off, n)
	if err != nil {
		return nil, err
	}
	if mode == Cut || mode == Stall {
		i, err := s.Store.Stat(ctx, key)
		if err != nil {
			r.Close()
			return nil, err
		}
		if left := max(0, i.Size-off); n < 0 || n > left {
			n = left
		}
	}
	return &struct {
		io.Reader
		io.Closer
	}{&Body{Ctx: ctx, R: r, Mode: mode, Middle: n / 2, Limit: st.limit}, r}, nil
}

// Put breaks in the middle of what is written.
func (s *Store) Put(ctx context.Context, key string, r io.Reader, o blob.PutOptions) error {
	st, mode, err := s.begin(ctx, "put", "write object", key)
	if err != nil {
		return err
	}
	if mode == Corrupt {
		mode = None // only what is read
	}
	return s.Store.Put(ctx, key, &Body{Ctx: ctx, R: r, Mode: mode, Middle: 1, Limit: st.limit}, o)
}

// Stat implements blob.Store.
func (s *Store) Stat(ctx context.Context, key string) (blob.Info, error) {
	if _, _, err := s.begin(ctx, "stat", "stat object", key); err != nil {
		return blob.Info{}, err
	}
	return s.Store.Stat(ctx, key)
}

// Delete implements blob.Store. What is missing is deleted.
func (s *Store) Delete(ctx context.Context, key string) error {
	_, mode, err := s.begin(ctx, "delete", "delete object", key)
	if mode == Missing {
		return nil
	}
	if err != nil {
		return err
	}
	return s.Store.Delete(ctx, key)
}

// List implements blob.Store.
func (s *Store) List(ctx context.Context, prefix string) iter.Seq2[blob.Info, error] {
	return func(yield func(blob.Info, error) bool) {
		if _, _, err := s.begin(ctx, "list", "list objects", prefix); err != nil {
			yield(blob.Info{}, err)
			return
		}
		s.Store.List(ctx, prefix)(yield)
	}
}

// Body is content that goes wrong after Middle bytes, or is slow, or false.
type Body struct {
	Ctx    context.Context // ends a stall
	R      io.Reader
	Mode   Mode
	Middle int64
	Limit  *rate.Limiter

	done int64
}

// ErrCut is how a body that is cut ends.
var ErrCut = errors.New("cut off")

// damageEvery is the distance of bytes that are wrong in a corrupt body.
const damageEvery = 4096

// Read implements io.Reader.
func (b *Body) Read(p []byte) (int, error) {
	if b.Limit != nil && len(p) > b.Limit.Burst() {
		p = p[:b.Limit.Burst()]
	}
	if b.Mode == Cut || b.Mode == Stall {
		if left := b.Middle - b.done; left <= 0 {
			return 0, b.broken()
		} else if int64(len(p)) > left {
			p = p[:left]
		}
	}
	n, err := b.R.Read(p)
	if b.Mode == Corrupt {
		for i := range p[:n] {
			if (b.done+int64(i))%damageEvery == 0 {
				p[i] ^= 0x5a
			}
		}
	}
	b.done += int64(n)
	if b.Limit != nil && n > 0 {
		if werr := b.Limit.WaitN(b.Ctx, n); werr != nil {
			return n, dsec.E(dsec.ClassOf(b.Ctx.Err()), "read object", "", werr)
		}
	}
	return n, err
}

func (b *Body) broken() error {
	if b.Mode == Cut {
		return dsec.E(dsec.Unavailable, "read object", "", ErrCut)
	}
	<-b.Ctx.Done()
	return dsec.E(dsec.ClassOf(b.Ctx.Err()), "read object", "", b.Ctx.Err())
}

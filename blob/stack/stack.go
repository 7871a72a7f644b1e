// Package stack puts the decorators of a blob.Store over it in the order that
// makes sense, with defaults, and counts what they do.
//
//	retry ( limit ( hedge ( stall ( count ( store )))))
//
// From the outside:
//
//   - retry: while it waits, its request holds no place, and every try counts
//     against the limits as a request does.
//   - limit: a read that waits for its place is not late for hedge, and bytes that
//     are held back are no sign of a slow store. A second request needs a place
//     that is free, so that hedges never go beyond the limit.
//   - hedge: a request that stalls is first raced, then given up.
//   - stall: measures only the store, not what waits above it.
//   - count: sees what the server sees.
package stack

import (
	"context"
	"io"
	"iter"
	"sync"
	"sync/atomic"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob"
	"github.com/opendsec/dsec/blob/hedge"
	"github.com/opendsec/dsec/blob/limit"
	"github.com/opendsec/dsec/blob/retry"
	"github.com/opendsec/dsec/blob/stall"
)

// Options of the decorators; zero values are their defaults.
type Options struct {
	Limiter *limit.Limiter // of the host, if other stores use it, too; nil: one of its own
	Limits  limit.Limits   // of a Limiter of its own
	Retry   retry.Policy   // Retried may be set; it is called besides the counting
	Hedge   hedge.Options  // Spare is taken from the Limiter
	Stall   stall.Limits
}

// Ops are the requests that are counted apart.
var Ops = [...]string{"open", "put", "stat", "delete", "list"}

// Stats are counted from the start.
type Stats struct {
	Requests map[string]int64     // as the server saw them, by one of Ops
	Failures map[dsec.Class]int64 // of them, and of bodies that broke
	InFlight int64                // requests at this moment, bodies being read among them
	Read     int64                // bytes of bodies
	Written  int64
	Retries  int64
	Hedge    hedge.Stats
	Limit    limit.Stats // of the Limiter, which may be shared
}

// Store is a store with everything over it.
type Store struct {
	blob.Store
	base    blob.Store
	count   *counting
	hedge   *hedge.Store
	limiter *limit.Limiter
	retries atomic.Int64
}

// New puts everything over a store.
func New(base blob.Store, o Options) *Store {
	s := &Store{base: base, limiter: o.Limiter}
	if s.limiter == nil {
		s.limiter = limit.NewLimiter(o.Limits)
	}
	s.count = &counting{Store: base, failures: map[dsec.Class]int64{}}
	o.Hedge.Spare = s.limiter.Try
	s.hedge = hedge.New(stall.New(s.count, o.Stall), o.Hedge)
	told := o.Retry.Retried
	o.Retry.Retried = func(err error) {
		s.retries.Add(1)
		if told != nil {
			told(err)
		}
	}
	s.Store = retry.New(limit.New(s.hedge, s.limiter), o.Retry)
	return s
}

// Sweep implements blob.Sweeper if the store does; else there is nothing to do.
func (s *Store) Sweep(ctx context.Context, age time.Duration) (int, error) {
	if sweeper, ok := s.base.(blob.Sweeper); ok {
		return sweeper.Sweep(ctx, age)
	}
	return 0, nil
}

// Stats so far.
func (s *Store) Stats() Stats {
	out := Stats{Requests: map[string]int64{}, Failures: s.count.failed(), InFlight: s.count.inFlight.Load(), Read: s.count.read.Load(),
		Written: s.count.written.Load(), Retries: s.retries.Load(), Hedge: s.hedge.Stats(), Limit: s.limiter.Stats()}
	for i, op := range Ops {
		out.Requests[op] = s.count.requests[i].Load()
	}
	return out
}

const (
	opOpen = iota
	opPut
	opStat
	opDelete
	opList
)

// counting counts what reaches the store.
type counting struct {
	blob.Store
	requests      [len(Ops)]atomic.Int64
	inFlight      atomic.Int64
	read, written atomic.Int64

	mu       sync.Mutex
	failures map[dsec.Class]int64
}

func (c *counting) begin(op int) {
	c.requests[op].Add(1)
	c.inFlight.Add(1)
}

func (c *counting) end(err error) error {
	c.inFlight.Add(-1)
	return c.seen(err)
}

func (c *counting) seen(err error) error {
	if err != nil && err != io.EOF {
		c.mu.Lock()
		c.failures[dsec.ClassOf(err)]++
		c.mu.Unlock()
	}
	return err
}

func (c *counting) failed() map[dsec.Class]int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	out := make(map[dsec.Class]int64, len(c.failures))
	for class, n := range c.failures {
		out[class] = n
	}
	return out
}

func (c *counting) Open(ctx context.Context, key string, off, n int64) (io.ReadCloser, error) {
	c.begin(opOpen)
	r, err := c.Store.Open(ctx, key, off, n)
	if err != nil {
		return nil, c.end(err)
	}
	return &reader{r: r, c: c, done: sync.OnceFunc(func() { c.inFlight.Add(-1) })}, nil
}

type reader struct {
	r    io.ReadCloser
	c    *counting
	done func()
}

func (r *reader) Read(p []byte) (int, error) {
	n, err := r.r.Read(p)
	r.c.read.Add(int64(n))
	return n, r.c.seen(err)
}

func (r *reader) Close() error {
	defer r.done()
	return r.r.Close()
}

func (c *counting) Put(ctx context.Context, key string, r io.Reader, o blob.PutOptions) error {
	c.begin(opPut)
	var body io.Reader = &written{r, c}
	if seeker, ok := r.(io.Seeker); ok {
		body = struct {
			io.Reader
			io.Seeker
		}{body, seeker}
	}
	return c.end(c.Store.Put(ctx, key, body, o))
}

type written struct {
	r io.Reader
	c *counting
}

func (w *written) Read(p []byte) (int, error) {
	n, err := w.r.Read(p)
	w.c.written.Add(int64(n))
	return n, err
}

func (c *counting) Stat(ctx context.Context, key string) (blob.Info, error) {
	c.begin(opStat)
	i, err := c.Store.Stat(ctx, key)
	return i, c.end(err)
}

func (c *counting) Delete(ctx context.Context, key string) error {
	c.begin(opDelete)
	return c.end(c.Store.Delete(ctx, key))
}

func (c *counting) List(ctx context.Context, prefix string) iter.Seq2[blob.Info, error] {
	return func(yield func(blob.Info, error) bool) {
		c.begin(opList)
		defer c.inFlight.Add(-1)
		for i, err := range c.Store.List(ctx, prefix) {
			if !yield(i, c.seen(err)) {
				return
			}
		}
	}
}

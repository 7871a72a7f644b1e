// Package hedge is a blob.Store that asks a second time for what is late. A read
// whose first byte has not come after the 99th percentile of what recent reads
// of a similar size took gets another request; the first to have a byte wins and
// the other is cancelled.
//
// So that a slow store does not get twice the load, only a few percent of the
// reads may be hedged, whatever their times; and a second request needs a place
// that is free (Spare). While too little is known about a size, nothing is
// hedged.
//
// Only reads are: a second write could win over a later one.
package hedge

import (
	"context"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob"
)

// Options; zero values are the defaults.
type Options struct {
	Share float64       // of the reads that may be hedged; default 0.05
	Known int           // reads of a size that must have been seen; default 32
	Least time.Duration // a hedge comes no earlier; default 2 ms
	// Spare takes a place for a second request, if there is one; nil: always.
	Spare func() (release func(), ok bool)
}

// Stats are counted from the start.
type Stats struct {
	Hedges int64 // second requests
	Won    int64 // those that were first
	Denied int64 // reads that were late and got none: the share was used up, or no place free
}

// Store decorates another.
type Store struct {
	blob.Store
	o     Options
	times times
	work  sync.WaitGroup // requests that have lost

	hedges, won, denied atomic.Int64
}

// New decorates a store.
func New(s blob.Store, o Options) *Store {
	if o.Share == 0 {
		o.Share = 0.05
	}
	if o.Known == 0 {
		o.Known = 32
	}
	if o.Least == 0 {
		o.Least = 2 * time.Millisecond
	}
	if o.Spare == nil {
		o.Spare = func() (func(), bool) { return func() {}, true }
	}
	return &Store{Store: s, o: o}
}

// Stats so far.
func (s *Store) Stats() Stats { return Stats{s.hedges.Load(), s.won.Load(), s.denied.Load()} }

// Close waits for the requests that have lost.
func (s *Store) Close() error {
	s.work.Wait()
	return s.Store.Close()
}

// Open implements blob.Store. It returns when the first byte is there.
func (s *Store) Open(ctx context.Context, key string, off, n int64) (io.ReadCloser, error) {
	if n == 0 {
		return s.Store.Open(ctx, key, off, n)
	}
	c := s.times.of(n)
	late, known := c.late(s.o.Known)
	s.times.earn(s.o.Share)
	race := &race{s: s, ctx: ctx, key: key, off: off, n: n, came: make(chan *runner, 2)}
	began := time.Now()
	var r *reader
	var err error
	if known {
		r, err = race.run(max(late, s.o.Least))
	} else {
		r, err = race.alone()
	}
	if err != nil {
		return nil, err
	}
	c.add(time.Since(began))
	return r, nil
}

// race is one read, of which there may be two requests.
type race struct {
	s      *Store
	ctx    context.Context
	key    string
	off, n int64
	came   chan *runner // those that have an outcome
}

// runner is one request.
type runner struct {
	cancel  context.CancelFunc
	release func() // of its place
	hedge   bool
	r       *reader
	err     error
}

// alone needs no goroutine.
func (c *race) alone() (*reader, error) {
	ctx, cancel := context.WithCancel(c.ctx)
	run := &runner{cancel: cancel, release: func() {}}
	c.request(ctx, run)
	return c.end(run, nil)
}

func (c *race) start(hedge bool, release func()) *runner {
	ctx, cancel := context.WithCancel(c.ctx)
	run := &runner{cancel: cancel, release: release, hedge: hedge}
	c.s.work.Add(1)
	go func() {
		defer c.s.work.Done()
		c.request(ctx, run)
		c.came <- run
	}()
	return run
}

// firstBytes is how much of an object is read to know that it comes.
const firstBytes = 16 << 10

func (c *race) request(ctx context.Context, run *runner) {
	r, err := c.s.Store.Open(ctx, c.key, c.off, c.n)
	if err != nil {
		run.err = err
		return
	}
	size := int64(firstBytes)
	if c.n > 0 {
		size = min(size, c.n)
	}
	buf := make([]byte, size)
	n := 0
	for n == 0 && err == nil {
		n, err = r.Read(buf)
	}
	if n == 0 && err != io.EOF {
		r.Close()
		run.err = err
		return
	}
	run.r = &reader{r: r, first: buf[:n], err: err, done: func() { run.cancel(); run.release() }}
}

func (c *race) run(late time.Duration) (*reader, error) {
	first := c.start(false, func() {})
	clock := time.NewTimer(late)
	defer clock.Stop()
	select {
	case run := <-c.came:
		return c.end(run, nil)
	case <-clock.C:
	}
	second := c.hedge()
	if second == nil {
		return c.end(<-c.came, nil)
	}
	run := <-c.came
	other := first
	if run == first {
		other = second
	}
	if dsec.ClassOf(run.err) == dsec.Unavailable { // the other may still come
		run.cancel()
		run.release()
		run, other = <-c.came, nil
	}
	if run.hedge && run.err == nil {
		c.s.won.Add(1)
	}
	return c.end(run, other)
}

// hedge starts a second request, if there may be one.
func (c *race) hedge() *runner {
	if !c.s.times.spend() {
		c.s.denied.Add(1)
		return nil
	}
	release, ok := c.s.o.Spare()
	if !ok {
		c.s.times.refund()
		c.s.denied.Add(1)
		return nil
	}
	c.s.hedges.Add(1)
	return c.start(true, release)
}

// end gives the outcome of one request and ends the other, if it still runs.
func (c *race) end(run, other *runner) (*reader, error) {
	if other != nil {
		other.cancel()
		c.s.work.Go(func() {
			<-c.came // the other
			if other.r != nil {
				other.r.Close()
				return
			}
			other.release()
		})
	}
	if run.err != nil {
		run.cancel()
		run.release()
		return nil, run.err
	}
	return run.r, nil
}

// reader begins with what was read already.
type reader struct {
	r     io.ReadCloser
	first []byte
	err   error // after first
	done  func()
}

func (r *reader) Read(p []byte) (int, error) {
	if len(r.first) > 0 {
		n := copy(p, r.first)
		r.first = r.first[n:]
		return n, nil
	}
	if r.err != nil {
		return 0, r.err
	}
	return r.r.Read(p)
}

func (r *reader) Close() error {
	defer r.done()
	return r.r.Close()
}

package hedge

import (
	"context"
	"errors"
	"io"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob"
	"github.com/opendsec/dsec/blob/blobtest"
	"github.com/opendsec/dsec/blob/bucket"
)

// scripted answers reads as it is told, and knows which were given up.
type scripted struct {
	blob.Store
	mu     sync.Mutex
	script []func(ctx context.Context) error // of the next requests; then all are answered
	opened atomic.Int64
	open   atomic.Int64
}

func (s *scripted) Open(ctx context.Context, key string, off, n int64) (io.ReadCloser, error) {
	s.opened.Add(1)
	s.mu.Lock()
	var step func(context.Context) error
	if len(s.script) > 0 {
		step, s.script = s.script[0], s.script[1:]
	}
	s.mu.Unlock()
	if step != nil {
		if err := step(ctx); err != nil {
			return nil, err
		}
	}
	r, err := s.Store.Open(ctx, key, off, n)
	if err != nil {
		return nil, err
	}
	s.open.Add(1)
	return &closing{r, s}, nil
}

type closing struct {
	io.ReadCloser
	s *scripted
}

func (c *closing) Close() error {
	c.s.open.Add(-1)
	return c.ReadCloser.Close()
}

func hangs(gone *atomic.Int64) func(context.Context) error {
	return func(ctx context.Context) error {
		<-ctx.Done()
		gone.Add(1)
		return dsec.E(dsec.ClassOf(ctx.Err()), "read object", "", ctx.Err())
	}
}

func fails(c dsec.Class) func(context.Context) error {
	return func(context.Context) error { return dsec.E(c, "read object", "k", nil) }
}

const text = "0123456789"

// warm is a store that knows how long reads take.
func warm(t *testing.T, o Options) (*scripted, *Store) {
	t.Helper()
	m, err := bucket.Open(t.Context(), "mem://")
	if err != nil {
		t.Fatal(err)
	}
	base := &scripted{Store: m}
	o.Least = time.Millisecond
	s := New(base, o)
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
		if n := base.open.Load(); n != 0 {
			t.Errorf("%d bodies were not closed", n)
		}
	})
	if err := blob.PutBytes(t.Context(), s, "k", []byte(text), blob.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	for range 64 {
		read(t, s)
	}
	s.times.mu.Lock()
	s.times.saved = mostSaved // as after many
	s.times.mu.Unlock()
	return base, s
}

func read(t *testing.T, s blob.Store) {
	t.Helper()
	if b, err := blob.ReadAll(context.Background(), s, "k", 10); err != nil || string(b) != text {
		t.Errorf("%q, %v", b, err)
	}
}

func TestConformance(t *testing.T) {
	blobtest.Run(t, func(t *testing.T) blob.Store {
		m, err := bucket.Open(t.Context(), "mem://")
		if err != nil {
			t.Fatal(err)
		}
		return New(m, Options{Known: 1, Share: 1, Least: 1}) // hedges nearly everything
	})
}

func TestALateReadIsRacedAndTheLoserCancelled(t *testing.T) {
	base, s := warm(t, Options{})
	var gone atomic.Int64
	before := s.Stats()
	base.script = append(base.script, hangs(&gone))
	read(t, s)
	s.work.Wait()
	after := s.Stats()
	if after.Hedges != before.Hedges+1 || after.Won != before.Won+1 || gone.Load() != 1 {
		t.Errorf("%+v, then %+v; %d given up", before, after, gone.Load())
	}
}

func TestTheFirstToFailDoesNotWin(t *testing.T) {
	base, s := warm(t, Options{})
	failing := make(chan struct{})
	base.script = append(base.script,
		func(ctx context.Context) error { // late, and then fails while the second is on its way
			<-failing
			return dsec.E(dsec.Unavailable, "read object", "k", nil)
		},
		func(context.Context) error { close(failing); return nil })
	read(t, s)
	base.script = append(base.script, func(context.Context) error { time.Sleep(5 * time.Millisecond); return nil }, fails(dsec.Unavailable))
	read(t, s)
}

func TestAnAnswerThatWillNotChangeEndsTheRace(t *testing.T) {
	base, s := warm(t, Options{})
	var gone atomic.Int64
	base.script = append(base.script, hangs(&gone), fails(dsec.PermissionDenied))
	_, err := s.Open(t.Context(), "k", 0, 11)
	s.work.Wait()
	if !errors.Is(err, dsec.PermissionDenied.Err()) || gone.Load() != 1 {
		t.Errorf("%v; %d given up", err, gone.Load())
	}
}

func TestBothFail(t *testing.T) {
	base, s := warm(t, Options{})
	both := make(chan struct{})
	base.script = append(base.script, func(context.Context) error { <-both; return fails(dsec.Unavailable)(nil) },
		func(context.Context) error { close(both); return fails(dsec.Unavailable)(nil) })
	if _, err := s.Open(t.Context(), "k", 0, 11); !errors.Is(err, dsec.Unavailable.Err()) {
		t.Error(err)
	}
}

// A store that is slow as a whole gets a few percent more requests, not twice as many.
func TestASlowStoreIsNotAskedTwice(t *testing.T) {
	base, s := warm(t, Options{Share: 0.05})
	before, opened := s.Stats(), base.opened.Load()
	const n = 200
	for range n {
		base.script = append(base.script, func(context.Context) error { time.Sleep(3 * time.Millisecond); return nil })
		read(t, s)
		s.work.Wait()
		base.script = nil // what a hedge did not use
	}
	after := s.Stats()
	hedges := after.Hedges - before.Hedges
	if hedges > n*0.05+mostSaved || base.opened.Load()-opened != n+hedges {
		t.Errorf("%d hedges for %d reads, %d requests", hedges, n, base.opened.Load()-opened)
	}
	if hedges == 0 {
		t.Error("no hedge at all")
	}
}

func TestNoPlaceNoHedge(t *testing.T) {
	var asked, released atomic.Int64
	free := true
	base, s := warm(t, Options{Spare: func() (func(), bool) {
		asked.Add(1)
		return func() { released.Add(1) }, free
	}})
	s.work.Wait()
	asked.Store(0)
	released.Store(0)
	var gone atomic.Int64
	base.script = append(base.script, hangs(&gone))
	read(t, s)
	s.work.Wait()
	if asked.Load() != 1 || released.Load() != 1 {
		t.Errorf("place asked for %d times, given back %d times", asked.Load(), released.Load())
	}
	free = false
	before := s.Stats()
	base.script = append(base.script, func(context.Context) error { time.Sleep(20 * time.Millisecond); return nil })
	read(t, s)
	if after := s.Stats(); after.Hedges != before.Hedges || after.Denied != before.Denied+1 {
		t.Errorf("%+v, then %+v", before, after)
	}
}

func TestNothingIsHedgedBeforeTimesAreKnown(t *testing.T) {
	m, err := bucket.Open(t.Context(), "mem://")
	if err != nil {
		t.Fatal(err)
	}
	base := &scripted{Store: m}
	s := New(base, Options{Known: 5, Share: 1, Least: 1})
	if err := blob.PutBytes(t.Context(), s, "k", []byte(strings.Repeat(text, 1000)), blob.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	for i := range 5 {
		base.script = append(base.script, func(context.Context) error { time.Sleep(time.Duration(i) * time.Millisecond); return nil })
		if _, err := blob.ReadAll(t.Context(), s, "k", 1<<20); err != nil {
			t.Fatal(err)
		}
	}
	if n := s.Stats().Hedges; n != 0 || base.opened.Load() != 5 {
		t.Errorf("%d hedges", n)
	}
}

func TestThePercentileFollowsTheTimes(t *testing.T) {
	var c class
	for i := range 100 {
		c.add(time.Duration(i+1) * time.Millisecond)
	}
	if d, ok := c.late(32); !ok || d != 99*time.Millisecond {
		t.Errorf("%v, %v", d, ok)
	}
	for range recent {
		c.add(time.Second)
	}
	if d, _ := c.late(32); d != time.Second {
		t.Errorf("after it became slow %v", d)
	}
}

package ondemand

import (
	"context"
	"errors"
	"math"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob"
	"github.com/opendsec/dsec/blob/fault"
	"github.com/opendsec/dsec/layer"
)

func TestAChunkIsFetchedOnceForAll(t *testing.T) {
	o := newOrigin(t, 0, noise(1, 100_000)...)
	g := newGate(o.store)
	l := o.open(t, Options{Blobs: g})
	var all sync.WaitGroup
	var failed atomic.Int32
	for i := range 32 {
		all.Go(func() {
			if l.Ensure(context.Background(), int64(i), 1000) != nil {
				failed.Add(1)
			}
		})
	}
	<-g.began
	close(g.pass)
	all.Wait()
	if s := l.Stats(); s.Requests != 1 || s.Plain != 100_000 || failed.Load() > 0 || !l.Complete() {
		t.Errorf("%+v, %d failed", s, failed.Load())
	}
	o.check(t, l, 0, 1)
}

// TestNeighboursComeTogether: also over gaps, equal ones once, zeros from nowhere.
func TestNeighboursComeTogether(t *testing.T) {
	c := noise(6, 50_000)
	o := newOrigin(t, 5000, c[0], c[1], make([]byte, 70_000), c[0], c[2], c[1], c[3])
	l := o.open(t, Options{})
	if err := l.Fill(context.Background()); err != nil {
		t.Fatal(err)
	}
	s := l.Stats()
	if s.Requests != 1 || s.Plain != l.Size() || s.Fetched > 4*56_000 || !l.Complete() {
		t.Errorf("%+v", s)
	}
	o.check(t, l, 0, len(o.plain))
	if err := l.Sync(); err != nil {
		t.Error(err)
	}
}

func TestPlan(t *testing.T) {
	ix := layer.Index{Chunks: []layer.Chunk{
		{Length: 100, Off: 0}, {Length: 100, Off: 100}, // together
		{Length: 100, Off: 200 + mostGap},                                    // a gap that is read
		{Length: 100, Off: 301 + 2*mostGap},                                  // one that is not
		{Length: 100, Pack: 1},                                               // elsewhere
		{},                                                                   // nowhere
		{Length: mostRun, Off: 10 << 20}, {Length: 1, Off: 10<<20 + mostRun}, // too much for one
		{Length: 2 * mostRun, Off: 30 << 20}, // alone
		{Length: 100, Off: 100},              // the same as another
	}}
	runs := plan(ix, []int{9, 8, 7, 6, 5, 4, 3, 2, 1, 0})
	want := [][]int{{0, 1, 9, 2}, {3}, {6}, {7}, {8}, {4}, {5}}
	if len(runs) != len(want) {
		t.Fatalf("%+v", runs)
	}
	for i, r := range runs {
		if len(r.chunks) != len(want[i]) {
			t.Errorf("run %d: %+v, want %v", i, r, want[i])
			continue
		}
		for k := range r.chunks {
			if r.chunks[k] != want[i][k] {
				t.Errorf("run %d: %+v, want %v", i, r, want[i])
			}
		}
	}
}

// TestForwardReadersAreRunAheadOf, farther and farther, and others are not.
func TestForwardReadersAreRunAheadOf(t *testing.T) {
	const size = 128 << 10
	offs := make([]int64, 401)
	for i := range offs {
		offs[i] = int64(i) * size
	}
	farthest := 0 // chunks behind a read
	count := func(r *readahead, from, to int) (n int) {
		for i := range r.next(from, to, offs) {
			if i < to {
				t.Errorf("chunk %d behind a read of [%d, %d)", i, from, to)
			}
			farthest = max(farthest, i+1-to)
			n++
		}
		return n
	}
	var forward readahead
	for i := range 200 {
		if n := count(&forward, i, i+1); i == 1 && (n == 0 || n > 4) {
			t.Errorf("%d chunks behind the second read", n)
		}
	}
	if farthest*size != maxView {
		t.Errorf("%d bytes ahead, want %d", farthest*size, maxView)
	}
	var wild readahead
	for range 300 {
		at := rand.IntN(100) * 4
		if n := count(&wild, at, at+1); n > 0 {
			t.Errorf("%d chunks behind a read at random", n)
		}
	}
	if n := count(&forward, 399, 400); n > 0 {
		t.Errorf("%d chunks behind the end", n)
	}
}

// TestReadersOfWhatIsExpectedAreNotRunAheadOf: nor is more fetched for one that
// comes before it.
func TestReadersOfWhatIsExpectedAreNotRunAheadOf(t *testing.T) {
	o := newOrigin(t, 0, noise(64, 50_000)...)
	l := o.open(t, Options{})
	l.ahead.expect(0, 16, 64) // as a Prefetch does that has not come far
	for i := range 16 {
		if err := l.Ensure(context.Background(), int64(i)*50_000, 50_000); err != nil {
			t.Fatal(err)
		}
	}
	if err := l.Prefetch(context.Background(), []Range{{Off: 0, Len: 16 * 50_000}}); err != nil {
		t.Fatal(err)
	}
	if s := l.Stats(); s.Plain != 16*50_000 {
		t.Errorf("%d bytes came, want %d", s.Plain, 16*50_000)
	}
	// What is read beyond is run ahead of as ever.
	for i := 16; i < 20; i++ {
		if err := l.Ensure(context.Background(), int64(i)*50_000, 50_000); err != nil {
			t.Fatal(err)
		}
	}
	if s := l.Stats(); s.Plain <= 20*50_000 {
		t.Errorf("%d bytes came, and nothing ahead", s.Plain)
	}
}

// TestPrefetchKeepsOrderAndBounds: in the order of the ranges, not all at once.
func TestPrefetchKeepsOrderAndBounds(t *testing.T) {
	o := newOrigin(t, mostGap+1, noise(200, 100)...) // no two in one request
	g := newGate(o.store)
	l := o.open(t, Options{Blobs: g, Lanes: NewLanes(2)}) // one for what is ahead
	var ranges []Range
	for i := 199; i >= 0; i-- {
		ranges = append(ranges, Range{Off: l.offs[i], Len: 1})
	}
	done := make(chan error, 1)
	go func() { done <- l.Prefetch(context.Background(), ranges) }()
	var offs []int64
	for range 200 {
		offs = append(offs, <-g.began)
		l.mu.Lock()
		if n := len(l.flights); n > 3*(len(offs)+leastBatch) {
			t.Errorf("%d chunks on their way when %d have come", n, len(offs)-1)
		}
		l.mu.Unlock()
		g.pass <- struct{}{}
	}
	if err := <-done; err != nil || !l.Complete() {
		t.Fatal(err)
	}
	// Those that wait for a lane at one time are in no order among themselves.
	for i := range offs {
		if last := max(0, 199-3*(i+leastBatch)); offs[i] < int64(o.ix.Chunks[last].Off) {
			t.Errorf("request %d is for %d", i, offs[i])
		}
	}
}

// TestPrefetchAsksForWhatLiesTogetherAtOnce, in whatever order it is wanted.
func TestPrefetchAsksForWhatLiesTogetherAtOnce(t *testing.T) {
	o := newOrigin(t, 0, noise(7*leastBatch, 1000)...)
	l := o.open(t, Options{})
	var ranges []Range
	for _, i := range rand.Perm(7 * leastBatch) {
		ranges = append(ranges, Range{Off: l.offs[i], Len: 1})
	}
	if err := l.Prefetch(context.Background(), ranges); err != nil || !l.Complete() {
		t.Fatal(err)
	}
	if s := l.Stats(); s.Requests > 3 { // of leastBatch, twice and four times as many chunks
		t.Errorf("%d requests", s.Requests)
	}
}

// TestAReaderHurriesWhatIsAhead: it does not wait for the lanes of prefetching.
func TestAReaderHurriesWhatIsAhead(t *testing.T) {
	o := newOrigin(t, mostGap+1, noise(3, 100)...)
	g := newGate(o.store)
	l := o.open(t, Options{Blobs: g, Lanes: NewLanes(2)})
	filled := make(chan error, 1)
	go func() { filled <- l.Fill(context.Background()) }()
	first := <-g.began // has the one lane there is for it
	other := 0
	if first == int64(o.ix.Chunks[0].Off) {
		other = 1
	}
	read := make(chan error, 1)
	go func() { read <- l.Ensure(context.Background(), l.offs[other], 1) }()
	if off := <-g.began; off != int64(o.ix.Chunks[other].Off) {
		t.Errorf("asked for %d", off)
	}
	close(g.pass)
	if err := errors.Join(<-read, <-filled); err != nil {
		t.Error(err)
	}
}

func TestCloseEndsWhatWaits(t *testing.T) {
	o := newOrigin(t, 0, noise(3, 1000)...)
	g := newGate(o.store)
	l := o.open(t, Options{Blobs: g})
	waits := make(chan error, 2)
	go func() { waits <- l.Ensure(context.Background(), 0, 1) }()
	go func() { waits <- l.Fill(context.Background()) }()
	<-g.began
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	for range 2 {
		if err := <-waits; !errors.Is(err, dsec.Canceled.Err()) {
			t.Errorf("what waited: %v", err)
		}
	}
	if _, err := l.ReadAt(context.Background(), make([]byte, 1), 0); !errors.Is(err, dsec.Canceled.Err()) {
		t.Errorf("read what is closed: %v", err)
	}
	if err := l.Close(); err != nil {
		t.Errorf("again: %v", err)
	}
	if err := l.Sync(); !errors.Is(err, dsec.Canceled.Err()) {
		t.Errorf("sync what is closed: %v", err)
	}
}

// TestDeadline: it is told in time, once more to who asks at once, and tried
// again later.
func TestDeadline(t *testing.T) {
	o := newOrigin(t, 0, noise(1, 1000)...)
	synctest.Test(t, func(t *testing.T) {
		const deadline = 10 * time.Second
		l := o.open(t, Options{Deadline: deadline})
		defer l.Close()
		o.store.Set(fault.Faults{Mode: fault.Hang})
		began := time.Now()
		if err := l.Ensure(context.Background(), 0, 1); !errors.Is(err, dsec.Timeout.Err()) || time.Since(began) != deadline {
			t.Errorf("after %v: %v", time.Since(began), err)
		}
		o.store.Set(fault.Faults{})
		began = time.Now()
		if err := l.Ensure(context.Background(), 0, 1); !errors.Is(err, dsec.Timeout.Err()) || time.Since(began) != 0 {
			t.Errorf("at once: after %v: %v", time.Since(began), err)
		}
		time.Sleep(time.Second + 1)
		if err := l.Ensure(context.Background(), 0, 1); err != nil {
			t.Errorf("later: %v", err)
		}
		if s := l.Stats(); s.Failures != 2 || !errors.Is(s.Last, dsec.Timeout.Err()) {
			t.Errorf("%+v", s)
		}
	})
}

func TestWhoWentAwayIsNoFailure(t *testing.T) {
	o := newOrigin(t, 0, noise(1, 1000)...)
	g := newGate(o.store)
	l := o.open(t, Options{Blobs: g})
	ctx, cancel := context.WithCancel(context.Background())
	wait := make(chan error, 1)
	go func() { wait <- l.Ensure(ctx, 0, 1) }()
	<-g.began
	cancel()
	if err := <-wait; !errors.Is(err, dsec.Canceled.Err()) {
		t.Error(err)
	}
	if s := l.Stats(); s.Failures > 0 || s.Last != nil {
		t.Errorf("%+v", s)
	}
	close(g.pass)
	o.check(t, l, 0, 1)
}

// TestFailuresHaveTheirClass, and what a broken store gave is not believed.
func TestFailuresHaveTheirClass(t *testing.T) {
	for mode, class := range map[fault.Mode]dsec.Class{fault.Refuse: dsec.Unavailable, fault.Cut: dsec.Unavailable, fault.Throttled: dsec.Unavailable,
		fault.Forbidden: dsec.PermissionDenied, fault.Missing: dsec.NotFound, fault.Corrupt: dsec.Corrupt} {
		o := newOrigin(t, 0, noise(3, 9000)...)
		l := o.open(t, Options{})
		o.store.Set(fault.Faults{Mode: mode})
		if err := l.Ensure(context.Background(), 0, l.Size()); dsec.ClassOf(err) != class {
			t.Errorf("%s: %v, want %s", mode, err, class)
		}
		if n, _ := l.Here(); n > 2 || mode == fault.Corrupt && n > 0 { // the first of a body that was cut may be whole
			t.Errorf("%s: %d chunks are here", mode, n)
		}
		o.store.Set(fault.Faults{})
		for end := time.Now().Add(time.Minute); l.Ensure(context.Background(), 0, l.Size()) != nil && time.Now().Before(end); {
			continue
		}
		o.check(t, l, 0, 3)
	}
	o := newOrigin(t, 0, noise(1, 9000)...)
	l := o.open(t, Options{})
	if err := blob.PutBytes(context.Background(), o.store, o.key(), []byte("short"), blob.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := l.Ensure(context.Background(), 0, 1); dsec.ClassOf(err) != dsec.Corrupt {
		t.Errorf("a short pack: %v", err)
	}
}

// TestADamagedChunkWithholdsNoOther of its request.
func TestADamagedChunkWithholdsNoOther(t *testing.T) {
	o := newOrigin(t, 0, append(noise(5, 9000), make([]byte, 8000))...)
	o.ix.Chunks[1].Sum[0] ^= 1
	o.ix.Chunks[5].Sum[0] ^= 1 // said to be zero
	l := o.open(t, Options{})
	if err := l.Fill(context.Background()); dsec.ClassOf(err) != dsec.Corrupt {
		t.Errorf("fill: %v", err)
	}
	o.check(t, l, 2, 5)
	o.check(t, l, 0, 1)
	if n, _ := l.Here(); n != 4 {
		t.Errorf("%d chunks are here", n)
	}
	for _, i := range []int{1, 5} {
		if err := l.Ensure(context.Background(), l.offs[i], 1); dsec.ClassOf(err) != dsec.Corrupt {
			t.Errorf("chunk %d: %v", i, err)
		}
	}
}

// TestWhatIsNearIsFetchedInVainOnlySoFar: a reader that goes about at random
// brings less beside what it asks for once it shows.
func TestWhatIsNearIsFetchedInVainOnlySoFar(t *testing.T) {
	o := newOrigin(t, 0, noise(400, 50_000)...)
	l := o.open(t, Options{})
	if err := l.Ensure(context.Background(), 0, 50_000); err != nil {
		t.Fatal(err)
	}
	waitLanded(t, l)
	if got := l.Stats().Plain; got < nearMax || got > nearMax+2*50_000 {
		t.Errorf("the first read brought %d bytes", got)
	}
	for range 200 { // of what is here: it makes nothing of what came less in vain
		if err := l.Ensure(context.Background(), 0, 50_000); err != nil {
			t.Fatal(err)
		}
	}
	before := l.Stats().Plain
	if err := l.Ensure(context.Background(), 200*50_000, 50_000); err != nil {
		t.Fatal(err)
	}
	waitLanded(t, l)
	if got := l.Stats().Plain - before; got < nearMin || got > nearMin+2*50_000 {
		t.Errorf("the second read, elsewhere, brought %d bytes", got)
	}
}

// TestARangeWithoutEndIsOneToTheEnd, as the kernel may ask for.
func TestARangeWithoutEndIsOneToTheEnd(t *testing.T) {
	o := newOrigin(t, 0, noise(4, 50_000)...)
	l := o.open(t, Options{})
	for _, off := range []int64{199_999, 0, 50_001, 200_000, 1 << 40} {
		if err := l.Ensure(context.Background(), off, math.MaxInt64-off); err != nil {
			t.Errorf("at %d: %v", off, err)
		}
	}
	if got := l.asked.Load(); got < 200_000 || got >= 200_000+traceBlock {
		t.Errorf("%d bytes were asked for", got)
	}
	if got := l.Trace(); len(got) == 0 || !l.Complete() {
		t.Errorf("%v", got)
	}
}

// waitLanded waits until nothing is on its way.
func waitLanded(t *testing.T, l *Layer) {
	t.Helper()
	for {
		l.mu.Lock()
		var f *flight
		for _, f = range l.flights {
			break
		}
		l.mu.Unlock()
		if f == nil {
			return
		}
		<-f.landed
	}
}

package loader

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob/fault"
	"github.com/opendsec/dsec/layer"
)

// broken serves a layer whose store refuses, in session 1.
func (w *world) broken(o Options) (r reader, stop func()) {
	w.t.Helper()
	refusing := fault.New(w.blobs)
	refusing.Set(fault.Faults{Mode: fault.Refuse})
	o.Blobs, o.Deadline = refusing, 100*time.Millisecond
	s, stop := w.serveWith(o)
	w.eventually("the loader answers", func() bool { _, err := w.client.Status(w.t.Context()); return err == nil })
	d, err := w.client.Device(w.t.Context(), w.layer)
	must(w.t, err)
	w.t.Cleanup(func() { _ = d.Mount.Close() })
	s.mu.Lock()
	defer s.mu.Unlock()
	x := s.layers[w.layer.Digest]
	return reader{data: x.data, s: s, x: x, session: prefix + w.layer.Digest.Hex() + "/" + d.Session}, stop
}

func (w *world) read(r reader) error {
	_, err := r.ReadAt(w.t.Context(), make([]byte, 4096), 0)
	return err
}

// reopen is the next agent.
func (w *world) reopen(failed func(context.Context, Trouble) bool) {
	w.t.Helper()
	must(w.t, w.client.Close())
	w.config.Failed = failed
	var err error
	w.client, err = Open(w.t.Context(), w.config)
	must(w.t, err)
}

// numbered counts the reads that have failed, and knows which was its own.
type numbered struct {
	data
	failed *atomic.Int64
	mine   int64
}

func (n *numbered) ReadAt(ctx context.Context, p []byte, off int64) (int, error) {
	k, err := n.data.ReadAt(ctx, p, off)
	n.mine = n.failed.Add(1)
	return k, err
}

// TestNobodyIsToldOfAnErrorBeforeItIsNoted: however many read at one time, each
// is noted after its read failed and before it hears of that.
func TestNobodyIsToldOfAnErrorBeforeItIsNoted(t *testing.T) {
	w := newWorld(t, FUSE)
	var failed, noted, notes atomic.Int64
	w.reopen(func(_ context.Context, x Trouble) bool {
		if x.Layer != w.layer.Digest || x.Session != "1" || dsec.ClassOf(x.Err) != dsec.Unavailable || time.Since(x.At) > time.Minute {
			t.Errorf("told of %+v", x)
		}
		notes.Add(1)
		noted.Store(failed.Load()) // one that fails from now on is not among them
		return true
	})
	r, stop := w.broken(Options{})
	defer stop()
	var all sync.WaitGroup
	for range 40 {
		all.Go(func() {
			for range 20 {
				mine := &numbered{data: r.data, failed: &failed}
				if err := w.read(reader{data: mine, s: r.s, x: r.x, session: r.session}); dsec.ClassOf(err) != dsec.Unavailable {
					t.Errorf("read: %v", err)
				}
				if noted.Load() < mine.mine {
					t.Error("an error was told before it was noted")
				}
			}
		})
	}
	all.Wait()
	if n := notes.Load(); n == 0 || n > 800 {
		t.Errorf("%d notes of 800 failed reads", n)
	}
	r.s.mu.Lock()
	defer r.s.mu.Unlock()
	if len(r.s.failing) > 0 {
		t.Errorf("kept of what is noted: %v", r.s.failing)
	}
}

// TestTheNextAgentIsToldOfWhatFailedWithoutOne: and a reader does not wait for
// it for ever.
func TestTheNextAgentIsToldOfWhatFailedWithoutOne(t *testing.T) {
	w := newWorld(t, FUSE)
	var short atomic.Int32
	w.config.Short = func(context.Context, bool) { short.Add(1) } // each agent, when it has handed over
	r, stop := w.broken(Options{NoteWithin: 100 * time.Millisecond})
	defer stop()
	w.reopen(func(ctx context.Context, _ Trouble) bool { <-ctx.Done(); return false }) // it ends before it has noted anything
	w.eventually("the agent is there", func() bool { _, err := w.client.Counts(t.Context()); return err == nil })
	before := time.Now()
	if err := w.read(r); dsec.ClassOf(err) != dsec.Unavailable {
		t.Fatalf("read: %v", err)
	}
	told := make(chan time.Time, 8)
	note := func(_ context.Context, x Trouble) bool { told <- x.At; return true }
	w.reopen(note)
	select {
	case at := <-told:
		if at.Before(before) || at.After(time.Now()) {
			t.Errorf("it failed at %v, after %v", at, before)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("it was not told")
	}
	w.eventually("it is noted", func() bool { return r.s.unnoted() == 0 })
	w.reopen(func(_ context.Context, x Trouble) bool { t.Errorf("told of what was noted: %+v", x); return true })
	w.eventually("the third agent is there", w.answers)
	w.eventually("it has handed over", func() bool { return short.Load() > 2 })
}

func (s *Server) unnoted() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.failing)
}

// TestWhatIsNotTakenIsToldAgain, and holds up nothing that fails behind it.
func TestWhatIsNotTakenIsToldAgain(t *testing.T) {
	w := newWorld(t, FUSE)
	var asked atomic.Int64
	w.reopen(func(context.Context, Trouble) bool { return asked.Add(1) > 3 })
	r, stop := w.broken(Options{NoteWithin: time.Second})
	defer stop()
	var all sync.WaitGroup
	for range 3 {
		all.Go(func() {
			if err := w.read(r); dsec.ClassOf(err) != dsec.Unavailable {
				t.Errorf("read: %v", err)
			}
		})
	}
	all.Wait()
	w.eventually("it is noted", func() bool { return r.s.unnoted() == 0 })
	if n := asked.Load(); n < 4 {
		t.Errorf("asked %d times", n)
	}
}

// TestOnlyWhatWasToldCanBeNoted: not by what another loader, or this one before,
// has told; and one session says nothing of another.
func TestOnlyWhatWasToldCanBeNoted(t *testing.T) {
	s := NewServer(Options{NoteWithin: time.Hour})
	defer s.stop(nil)
	x := &served{digest: layer.DigestOf(nil)}
	err := dsec.Errorf(dsec.Unavailable, "read", "", "away")
	at := time.Now()
	a, _ := s.raise(x, "a", at, err)
	b, _ := s.raise(x, "b", at, err)
	s.mu.Lock()
	a.sent, b.sent = 1, 1 // as if an agent were there
	s.mu.Unlock()
	for _, f := range []frame{
		{Session: "a", Number: 1, Generation: a.generation + 1},
		{Session: "a", Number: 1, Generation: b.generation},
		{Session: "a", Number: 2, Generation: a.generation},
		{Session: "c", Number: 1, Generation: a.generation},
	} {
		f.Digest = x.digest
		if s.noted(&f); a.noted != 0 || b.noted != 0 {
			t.Errorf("accepted %+v", f)
		}
	}
	later := at.Add(time.Second)
	s.raise(x, "a", later, err)
	s.noted(&frame{Digest: x.digest, Session: "a", Number: 1, Generation: a.generation})
	if a.noted != 1 || b.noted != 0 || !a.since.Equal(later) {
		t.Errorf("%+v, %+v", a, b)
	}
}

// TestTheWorstErrorIsTold, and the earliest time.
func TestTheWorstErrorIsTold(t *testing.T) {
	var x troubles
	at := time.Now()
	x.add(at, dsec.E(dsec.Unavailable, "read", "", nil))
	x.add(at.Add(-time.Minute), dsec.E(dsec.Corrupt, "read", "", nil))
	x.add(at, dsec.E(dsec.Timeout, "read", "", nil))
	if dsec.ClassOf(x.why) != dsec.Corrupt || !x.since.Equal(at.Add(-time.Minute)) || x.count != 3 {
		t.Errorf("%+v", x)
	}
	x.sent = 3
	x.add(at.Add(time.Minute), dsec.E(dsec.Timeout, "read", "", nil))
	if x.unsend(); !x.since.Equal(at.Add(-time.Minute)) || x.sent != 0 {
		t.Errorf("%+v", x)
	}
}

func TestPlausible(t *testing.T) {
	connected := time.Now()
	now := connected.Add(time.Hour)
	for at, want := range map[time.Time]time.Time{
		{}:                              connected,
		now.Add(time.Second):            now,
		connected.Add(-25 * time.Hour):  connected.Add(-24 * time.Hour),
		connected.Add(-time.Hour):       connected.Add(-time.Hour),
		connected.Add(30 * time.Minute): connected.Add(30 * time.Minute),
		time.Unix(1<<40, 0):             now,
		time.Unix(-1<<40, 0):            connected.Add(-24 * time.Hour),
	} {
		if got := plausible(at, connected, now); !got.Equal(want) {
			t.Errorf("%v: %v, want %v", at, got, want)
		}
	}
}

// TestWhatCouldNotBeSentIsSentAgain, to the agent that there is then, and holds up
// nothing behind it.
func TestWhatCouldNotBeSentIsSentAgain(t *testing.T) {
	s := NewServer(Options{NoteWithin: 100 * time.Millisecond})
	defer s.stop(nil)
	gone, _ := connected(t)
	must(t, gone.c.Close())
	s.agent = gone
	x := &served{digest: layer.DigestOf(nil)}
	tr, _ := s.raise(x, "a", time.Now(), dsec.E(dsec.Unavailable, "read", "", nil))
	_, mine := s.raise(x, "a", time.Now(), dsec.E(dsec.Unavailable, "read", "", nil))
	here, agent := connected(t)
	s.mu.Lock()
	s.agent = here
	s.mu.Unlock()
	must(t, agent.c.SetReadDeadline(time.Now().Add(20*time.Second)))
	f, err := agent.recv(make([]byte, maxFrame))
	if err != nil || f.Op != opTrouble || f.Number != mine || f.Generation != tr.generation || f.Session != "a" {
		t.Errorf("%+v, %v", f, err)
	}
}

// TestAnAgentThatTakesNothingHoldsUpNoReader for longer than one that does not
// answer.
func TestAnAgentThatTakesNothingHoldsUpNoReader(t *testing.T) {
	s := NewServer(Options{NoteWithin: 20 * time.Millisecond})
	defer s.stop(nil)
	stopped, _ := connected(t)
	stopped.within = time.Hour
	must(t, stopped.c.SetWriteDeadline(time.Now().Add(50*time.Millisecond)))
	for { // until no more finds room
		if _, err := stopped.c.Write(make([]byte, 1024)); err != nil {
			break
		}
	}
	s.agent = stopped
	told := make(chan struct{})
	go func() {
		s.failed(t.Context(), &served{digest: layer.DigestOf(nil)}, "a", dsec.E(dsec.Unavailable, "read", "", nil))
		close(told)
	}()
	select {
	case <-told:
	case <-time.After(20 * time.Second):
		t.Error("it waits")
	}
}

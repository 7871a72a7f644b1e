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

// broken serves a layer whose store refuses.
func (w *world) broken(o Options) (s *Server, read func() error, stop func()) {
	w.t.Helper()
	refusing := fault.New(w.blobs)
	refusing.Set(fault.Faults{Mode: fault.Refuse})
	o.Blobs, o.Deadline = refusing, 100*time.Millisecond
	s, stop = w.serveWith(o)
	w.eventually("the loader answers", func() bool { _, err := w.client.Status(w.t.Context()); return err == nil })
	d, err := w.client.Device(w.t.Context(), w.layer)
	must(w.t, err)
	w.t.Cleanup(func() { _ = d.Mount.Close() })
	return s, func() error {
		s.mu.Lock()
		x := s.layers[w.layer.Digest]
		s.mu.Unlock()
		_, err := reader{x.data, s, x}.ReadAt(w.t.Context(), make([]byte, 4096), 0)
		return err
	}, stop
}

// reopen is the next agent.
func (w *world) reopen(failed func(context.Context, layer.Digest, time.Time, error) bool) {
	w.t.Helper()
	must(w.t, w.client.Close())
	w.config.Failed = failed
	var err error
	w.client, err = Open(w.t.Context(), w.config)
	must(w.t, err)
}

// TestNobodyIsToldOfAnErrorBeforeItIsNoted: however many read at one time, each
// is noted after its read failed and before it hears of that.
func TestNobodyIsToldOfAnErrorBeforeItIsNoted(t *testing.T) {
	w := newWorld(t, FUSE)
	var begun, ended, notes atomic.Int64
	w.reopen(func(_ context.Context, d layer.Digest, at time.Time, err error) bool {
		if d != w.layer.Digest || dsec.ClassOf(err) != dsec.Unavailable || time.Since(at) > time.Minute {
			t.Errorf("told of %s, at %v: %v", d, at, err)
		}
		notes.Add(1)
		ended.Store(begun.Load())
		return true
	})
	_, read, stop := w.broken(Options{})
	defer stop()
	var all sync.WaitGroup
	for range 40 {
		all.Go(func() {
			for range 20 {
				mine := begun.Add(1)
				if err := read(); dsec.ClassOf(err) != dsec.Unavailable {
					t.Errorf("read: %v", err)
				}
				if ended.Load() < mine {
					t.Error("an error was told before it was noted")
				}
			}
		})
	}
	all.Wait()
	if n := notes.Load(); n == 0 || n > 800 {
		t.Errorf("%d notes of 800 failed reads", n)
	}
}

// TestTheNextAgentIsToldOfWhatFailedWithoutOne: and a reader does not wait for
// it for ever.
func TestTheNextAgentIsToldOfWhatFailedWithoutOne(t *testing.T) {
	w := newWorld(t, FUSE)
	s, read, stop := w.broken(Options{NoteWithin: 100 * time.Millisecond})
	defer stop()
	w.reopen(func(context.Context, layer.Digest, time.Time, error) bool { return false }) // it ends before it has noted anything
	w.eventually("the agent is there", func() bool { _, err := w.client.PID(t.Context()); return err == nil })
	before := time.Now()
	if err := read(); dsec.ClassOf(err) != dsec.Unavailable {
		t.Fatalf("read: %v", err)
	}
	told := make(chan time.Time, 8)
	note := func(_ context.Context, _ layer.Digest, at time.Time, _ error) bool { told <- at; return true }
	w.reopen(note)
	select {
	case at := <-told:
		if at.Before(before) || at.After(time.Now()) {
			t.Errorf("it failed at %v, after %v", at, before)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("it was not told")
	}
	w.eventually("it is noted", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		x := s.layers[w.layer.Digest]
		return x.trouble.noted == x.trouble.count
	})
	w.reopen(note)
	w.eventually("the third agent is there", func() bool { _, err := w.client.PID(t.Context()); return err == nil })
	if len(told) > 0 {
		t.Error("told of what was noted")
	}
}

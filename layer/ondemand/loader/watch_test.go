package loader

import (
	"context"
	"errors"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/layer"
)

// forgetful are data that the disk does not take, unless err is nil.
type forgetful struct {
	whole
	err error
}

func (f *forgetful) Sync() error { return f.err }

// TestWhoHasReadWhatWasLostIsNamed: since the last time that all was well.
func TestWhoHasReadWhatWasLostIsNamed(t *testing.T) {
	s := NewServer(Options{})
	defer s.stop(nil)
	data := &forgetful{}
	x := &served{digest: layer.DigestOf(nil), data: data, synced: time.Now().Add(-time.Hour)}
	began := time.Now()
	if !s.sync(x) {
		t.Error("it was not synced")
	}
	last := x.synced
	if last.Before(began) || s.unnoted() != 0 {
		t.Errorf("synced at %v, %d troubles", last, s.unnoted())
	}
	data.err = dsec.E(dsec.NoSpace, "sync layer", "", syscall.ENOSPC) // where a class is that passes
	if s.sync(x) || x.landed != unsynced {
		t.Error("it was synced")
	}
	tr := s.failing[failing{x.digest, ""}]
	if tr == nil || dsec.ClassOf(tr.why) != dsec.Internal || !errors.Is(tr.why, syscall.ENOSPC) || !tr.since.Equal(last) {
		t.Fatalf("%+v, want since %v", tr, last)
	}
	data.err = dsec.Errorf(dsec.Canceled, "sync layer", "", "closed")
	if s.sync(x) || tr.count != 1 {
		t.Errorf("%d troubles of what was closed", tr.count-1)
	}
}

// TestWhatNoLayerKnowsOfIsATrouble of that of the file, or of all by events.
func TestWhatNoLayerKnowsOfIsATrouble(t *testing.T) {
	s := NewServer(Options{NoteWithin: time.Millisecond})
	defer s.stop(nil)
	close(s.ready)
	add := func(name string, events bool, id fileID) *served {
		x := &served{digest: layer.DigestOf([]byte(name)), sessions: map[string]bool{name: events}}
		s.layers[x.digest], s.files[id] = x, x
		return x
	}
	a, b, c := add("a", true, fileID{1, 1}), add("b", true, fileID{1, 2}), add("c", false, fileID{1, 3})
	count := func(x *served) uint64 {
		s.mu.Lock()
		defer s.mu.Unlock()
		if tr := s.failing[failing{x.digest, ""}]; tr != nil && dsec.ClassOf(tr.why) == dsec.Internal {
			return tr.count
		}
		return 0
	}
	for i, id := range []fileID{{1, 1}, {0, 0}, {1, 4}} {
		s.refused(t.Context(), id.dev, id.ino, errors.New("no descriptor"))
		if got, want := [3]uint64{count(a), count(b), count(c)}, [3]uint64{uint64(i) + 1, uint64(i), 0}; got != want {
			t.Errorf("after %v: %v, want %v", id, got, want)
		}
	}
}

// TestALoaderThatEndsTellsNoReader: what is not noted is the next one's to answer.
func TestALoaderThatEndsTellsNoReader(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := NewServer(Options{})
		session, end := context.WithCancel(context.Background()) // it ends a moment after the server
		done := make(chan struct{})
		go func() {
			defer close(done)
			s.failed(session, &served{digest: layer.DigestOf(nil)}, "a", dsec.Errorf(dsec.Unavailable, "read", "", "away"))
		}()
		synctest.Wait()
		s.stop(nil)
		synctest.Wait()
		select {
		case <-done:
			t.Error("the reader is told before its session has ended")
		default:
		}
		end()
		<-done
		s.work.Wait()
	})
}

package loader

import (
	"errors"
	"syscall"
	"testing"
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

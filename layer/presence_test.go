package layer

import (
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

func newPresence(t *testing.T, chunks int) *Presence {
	t.Helper()
	path := filepath.Join(t.TempDir(), "present")
	if err := CreatePresence(path, chunks); err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	p, err := OpenPresence(f, chunks)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	})
	return p
}

// TestWhatOneSyncHasLostNoOtherNotes: the kernel tells of an error once, and who
// began before it and hears of none must not take what was lost for synced.
func TestWhatOneSyncHasLostNoOtherNotes(t *testing.T) {
	p := newPresence(t, 8)
	p.Set(3)
	var calls atomic.Int32
	entered, second := make(chan struct{}), make(chan struct{})
	p.flush = func(*os.File) error {
		if calls.Add(1) > 1 {
			return nil
		}
		close(entered)
		select {
		case <-second: // as it can be if both write at one time
		case <-time.After(100 * time.Millisecond):
		}
		return syscall.EIO
	}
	var all sync.WaitGroup
	all.Go(func() {
		if err := p.Sync(nil); !errors.Is(err, syscall.EIO) {
			t.Errorf("sync: %v", err)
		}
	})
	<-entered
	all.Go(func() {
		if err := p.Sync(nil); err != nil {
			t.Errorf("sync: %v", err)
		}
		close(second)
	})
	all.Wait()
	if p.Has(3) || p.Count() != 0 || p.synced[0] != 0 {
		t.Errorf("what was lost is here: %d chunks, synced %b", p.Count(), p.synced[0])
	}
}

// disk is one that loses some of what is written, and tells so once.
type disk struct {
	mu     sync.Mutex
	dirty  map[int]bool
	stays  map[int]bool
	failed bool
}

func (d *disk) write(i int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.dirty[i] = true
	delete(d.stays, i)
}

// writeBack is what the kernel does by itself.
func (d *disk) writeBack() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for i := range d.dirty {
		if delete(d.dirty, i); rand.IntN(50) == 0 {
			d.failed = true
		} else {
			d.stays[i] = true
		}
		break
	}
}

func (d *disk) flush(*os.File) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	for i := range d.dirty {
		d.stays[i] = true
	}
	clear(d.dirty)
	if d.failed {
		d.failed = false
		return syscall.EIO
	}
	return nil
}

// TestWhatIsNotedAsSyncedIsOnTheDisk, whoever syncs and writes at one time.
func TestWhatIsNotedAsSyncedIsOnTheDisk(t *testing.T) {
	const chunks = 64
	p := newPresence(t, chunks)
	d := &disk{dirty: map[int]bool{}, stays: map[int]bool{}}
	p.flush = d.flush
	var errs atomic.Int32
	var all sync.WaitGroup
	for g := range 4 { // each chunk is written by one at a time, and not while it is here
		all.Go(func() {
			for range 4000 {
				i := g*16 + rand.IntN(16)
				if p.Has(i) {
					if rand.IntN(4) > 0 {
						continue
					}
					if err := p.Clear(i); err != nil {
						t.Error(err)
					}
				}
				if err := p.Land(i, func() error { d.write(i); return nil }); err != nil {
					t.Error(err)
				}
			}
		})
	}
	done := make(chan struct{})
	var background sync.WaitGroup
	for range 3 {
		background.Go(func() {
			for {
				select {
				case <-done:
					return
				default:
				}
				d.writeBack()
				if p.Sync(nil) != nil {
					errs.Add(1)
				}
			}
		})
	}
	all.Wait()
	close(done)
	background.Wait()
	if p.Sync(nil) != nil && p.Sync(nil) != nil {
		t.Error("it is told twice")
	}
	for i := range chunks {
		if p.Has(i) && !d.stays[i] {
			t.Errorf("chunk %d is noted and lost", i)
		}
	}
	if errs.Load() == 0 {
		t.Error("nothing was lost")
	}
}

// TestWhatIsBeingWrittenWhenASyncFailsIsNotHere: it may be what was lost.
func TestWhatIsBeingWrittenWhenASyncFailsIsNotHere(t *testing.T) {
	p := newPresence(t, 8)
	failed, synced := make(chan struct{}), make(chan error, 1)
	p.flush = func(*os.File) error { close(failed); return syscall.EIO }
	err := p.Land(5, func() error {
		go func() { synced <- p.Sync(nil) }()
		<-failed
		select {
		case err := <-synced: // it has not waited
			synced <- err
		case <-time.After(50 * time.Millisecond):
		}
		return nil
	})
	if err := errors.Join(err, <-synced); !errors.Is(err, syscall.EIO) || p.Has(5) || p.Count() != 0 {
		t.Errorf("%d chunks are here, %v", p.Count(), err)
	}
}

// TestWhatComesAgainDuringASyncIsNotSynced by it.
func TestWhatComesAgainDuringASyncIsNotSynced(t *testing.T) {
	p := newPresence(t, 8)
	p.Set(2)
	p.Set(3)
	p.flush = func(*os.File) error {
		return errors.Join(p.Clear(3), p.Land(3, func() error { return nil }))
	}
	if err := p.Sync(nil); err != nil || p.synced[0] != 1<<2 || !p.Has(3) {
		t.Errorf("synced %b, live %b, %v", p.synced[0], p.live[0], err)
	}
}

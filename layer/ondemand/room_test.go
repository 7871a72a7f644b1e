package ondemand

import (
	"bytes"
	"context"
	"io"
	"math/rand/v2"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob"
)

// blocks of the disk that a file takes.
func blocks(t *testing.T, f *os.File) int64 {
	t.Helper()
	st, err := f.Stat()
	if err != nil {
		t.Fatal(err)
	}
	return st.Sys().(*syscall.Stat_t).Blocks
}

// TestWhatFindsNoRoomIsGivenAndNotKept: until there is some.
func TestWhatFindsNoRoomIsGivenAndNotKept(t *testing.T) {
	o := newOrigin(t, 0, noise(8, 100_000)...)
	// The time for which nothing is fetched ahead does not pass.
	synctest.Test(t, func(t *testing.T) { givenAndNotKept(t, o) })
}

func givenAndNotKept(t *testing.T, o *origin) {
	var short atomic.Int32
	room := NewRoom(func(diskFull bool) {
		if diskFull {
			t.Error("the disk is full")
		}
		short.Add(1)
	})
	room.SetLeft(250_000)
	l := o.open(t, Options{Room: room})
	o.check(t, l, 0, 8)
	o.check(t, l, 0, 8)
	here, _ := l.Here()
	s, uncached := l.Stats(), room.Uncached()
	if here != 2 || s.Failures > 0 || short.Load() != 1 || uncached.Reads < 12 || uncached.Bytes != uncached.Reads*100_000 {
		t.Errorf("%d chunks are here, %+v, %+v, told %d times", here, s, uncached, short.Load())
	}
	if s.Requests > 10 {
		t.Errorf("%d requests for 8 chunks that were read twice", s.Requests)
	}
	if n := blocks(t, l.parts.Data); n > 2*100_000/512+16 {
		t.Errorf("%d blocks are taken", n)
	}
	if err := l.Ensure(context.Background(), l.offs[7], 1); dsec.ClassOf(err) != dsec.NoSpace {
		t.Errorf("who reads the file: %v", err)
	}
	if err := l.Fill(context.Background()); dsec.ClassOf(err) != dsec.NoSpace {
		t.Errorf("what nobody reads: %v", err)
	}
	room.SetLeft(1 << 20)
	o.check(t, l, 0, 8)
	if !l.Complete() || blocks(t, l.parts.Data) < 800_000/512 {
		t.Error("it is not kept now that there is room")
	}
	again, err := os.ReadFile(l.parts.Data.Name())
	if err != nil || !bytes.Equal(again, bytes.Join(o.plain, nil)) {
		t.Errorf("the file has other bytes, %v", err)
	}
}

// TestWhatDoesNotStayInMemoryIsAskedForAlone: a reader of more than fits asks again
// for what it has not got, and for nothing else.
func TestWhatDoesNotStayInMemoryIsAskedForAlone(t *testing.T) {
	o := newOrigin(t, 0, noise(4, 100_000)...)
	synctest.Test(t, func(t *testing.T) {
		room := NewRoom(nil)
		room.SetLeft(0)
		room.most = 150_000
		l := o.open(t, Options{Room: room})
		b := make([]byte, 400_000)
		if _, err := l.ReadAt(context.Background(), b, 0); err != nil || !bytes.Equal(b, bytes.Join(o.plain, nil)) {
			t.Errorf("read: %v", err)
		}
		if s := l.Stats(); s.Requests != 4 || s.Fetched > (4+3+2+1)*100_200 || s.Failures > 0 {
			t.Errorf("%+v", s)
		}
		if u := room.Uncached(); u.Reads != 1 || u.Bytes != 400_000 {
			t.Errorf("%+v", u)
		}
	})
}

// spent is a store that has no room itself.
type spent struct {
	blob.Store
	asked atomic.Int32
}

func (s *spent) Open(context.Context, string, int64, int64) (io.ReadCloser, error) {
	s.asked.Add(1)
	return nil, dsec.Errorf(dsec.NoSpace, "read object", "", "QuotaExceeded")
}

// TestThatTheStoreHasNoRoomIsNotThatThereIsNoneHere: it is an error like any other,
// and told at once.
func TestThatTheStoreHasNoRoomIsNotThatThereIsNoneHere(t *testing.T) {
	o := newOrigin(t, 0, noise(2, 100_000)...)
	synctest.Test(t, func(t *testing.T) {
		store := &spent{Store: o.store}
		l := o.open(t, Options{Blobs: store, Room: NewRoom(func(bool) { t.Error("no room was found here") })})
		began := time.Now()
		if _, err := l.ReadAt(context.Background(), make([]byte, 4096), 0); dsec.ClassOf(err) != dsec.NoSpace {
			t.Errorf("read: %v", err)
		}
		if s := l.Stats(); store.asked.Load() != 1 || time.Since(began) != 0 || s.Failures != 1 || l.opts.Room.Uncached().Reads > 0 {
			t.Errorf("asked %d times in %v: %+v", store.asked.Load(), time.Since(began), s)
		}
	})
}

// TestMemoryOfWhatIsNotKeptIsBounded: readers of more than fits get all the same.
func TestMemoryOfWhatIsNotKeptIsBounded(t *testing.T) {
	o := newOrigin(t, 0, noise(40, 100_000)...)
	room := NewRoom(nil)
	room.SetLeft(0)
	room.most = 450_000
	l := o.open(t, Options{Room: room})
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			for range 60 {
				i := rand.IntN(40)
				if i < 38 && i%2 == 0 { // of three, not whole
					b := make([]byte, 220_000)
					n, err := l.ReadAt(context.Background(), b, l.offs[i]+50_000)
					if want := bytes.Join(o.plain[i:i+3], nil)[50_000:270_000]; err != nil || n != len(want) || !bytes.Equal(b, want) {
						t.Errorf("chunks from %d: %d, %v", i, n, err)
					}
				} else {
					o.check(t, l, i, i+1)
				}
				room.mu.Lock()
				if held := room.held; held > room.most {
					t.Errorf("%d bytes in memory", held)
				}
				room.mu.Unlock()
			}
		})
	}
	all.Wait()
	if here, _ := l.Here(); here > 0 {
		t.Errorf("%d chunks are here", here)
	}
	if err := l.Close(); err != nil || room.held != 0 || room.order.Len() != 0 || len(room.by) != 0 {
		t.Errorf("of a layer that is closed %d bytes are in memory, %v", room.held, err)
	}
}

// TestWhatIsReadFromTheFileHasNoBoundButTheDisk.
func TestWhatIsReadFromTheFileHasNoBoundButTheDisk(t *testing.T) {
	o := newOrigin(t, 0, noise(3, 100_000)...)
	room := NewRoom(func(bool) { t.Error("it found no room") })
	room.SetLeft(10)
	l := o.open(t, Options{Room: room})
	l.KeepAll()
	if err := l.Ensure(context.Background(), 0, l.Size()); err != nil || !l.Complete() {
		t.Errorf("%v", err)
	}
	o.check(t, l, 0, 3)
}

// TestWhatCouldNotBeSyncedIsFetchedAgain: the disk of a pipe never takes anything.
func TestWhatCouldNotBeSyncedIsFetchedAgain(t *testing.T) {
	o := newOrigin(t, 0, noise(6, 100_000)...)
	l := o.open(t, Options{})
	if err := l.Prefetch(context.Background(), []Range{{Off: 0, Len: 1}}); err != nil { // nothing beside it
		t.Fatal(err)
	}
	if err := l.Sync(); err != nil {
		t.Fatal(err)
	}
	if err := l.Fill(context.Background()); err != nil {
		t.Fatal(err)
	}
	failSync(t, l)
	if here, _ := l.Here(); here != 1 || l.Complete() {
		t.Errorf("%d chunks are here, one was on the disk", here)
	}
	if _, err := l.parts.Data.WriteAt(make([]byte, 100_000), l.offs[5]); err != nil { // as the kernel leaves it
		t.Fatal(err)
	}
	o.check(t, l, 0, 6)
}

// TestALayerIsWholeAgainAfterAFailedSync: who waits for it is told when it is so.
func TestALayerIsWholeAgainAfterAFailedSync(t *testing.T) {
	o := newOrigin(t, 0, noise(6, 100_000)...)
	l := o.open(t, Options{})
	if err := l.Fill(context.Background()); err != nil {
		t.Fatal(err)
	}
	<-l.Whole()
	failSync(t, l)
	again := l.Whole()
	select {
	case <-again:
		t.Error("it is whole, and nothing is on the disk")
	default:
	}
	if err := l.Fill(context.Background()); err != nil {
		t.Fatal(err)
	}
	<-again
	if err := l.Sync(); err != nil || !l.Complete() {
		t.Error(err)
	}
}

// failSync has a Sync of the layer find that nothing can be written to the disk.
func failSync(t *testing.T, l *Layer) {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	data := l.parts.Data
	l.parts.Data = w
	defer func() { l.parts.Data = data }()
	if err := l.Sync(); err == nil {
		t.Error("a pipe was synced")
	}
}

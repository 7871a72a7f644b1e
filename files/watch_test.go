package files

import (
	"context"
	"errors"
	"os"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
)

// watched collects changes until the one that ends the test.
type watched struct {
	seen map[Change]bool
	each chan Change
	err  chan error
	stop context.CancelFunc
}

func watch(t *testing.T, s service, dir string, recursive bool) *watched {
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	w := &watched{seen: map[Change]bool{}, each: make(chan Change, 1000), err: make(chan error, 1), stop: cancel}
	go func() {
		w.err <- s.fs.(Watcher).Watch(ctx, dir, recursive, func(c Change) error { w.each <- c; return nil })
	}()
	return w
}

// begin waits until the watch is in place.
func (w *watched) begin(t *testing.T, dir string) {
	t.Helper()
	select {
	case c := <-w.each:
		if c != (Change{dir, OpWatching}) {
			t.Fatalf("the first change is %v", c)
		}
	case err := <-w.err:
		t.Fatal(err)
	}
}

func (w *watched) want(t *testing.T, c Change) {
	t.Helper()
	for !w.seen[c] {
		select {
		case got := <-w.each:
			w.seen[got] = true
		case err := <-w.err:
			t.Fatalf("%v never came, %v did; the watch ended: %v", c, w.seen, err)
		}
	}
}

func TestChangesAreReported(t *testing.T) {
	each(t, func(t *testing.T, s service) {
		must(t, os.MkdirAll(s.host("/d/sub"), 0o755))
		w := watch(t, s, "/d", true)
		defer w.stop()
		w.begin(t, "/d")
		must(t, os.WriteFile(s.host("/d/sub/f"), []byte("x"), 0o644))
		w.want(t, Change{"/d/sub/f", OpCreate})
		w.want(t, Change{"/d/sub/f", OpWrite})
		must(t, os.Chmod(s.host("/d/sub/f"), 0o600))
		w.want(t, Change{"/d/sub/f", OpAttr})
		must(t, os.MkdirAll(s.host("/d/new/deep"), 0o755))
		must(t, os.WriteFile(s.host("/d/new/deep/f"), nil, 0o644))
		w.want(t, Change{"/d/new/deep/f", OpCreate})
		must(t, os.Rename(s.host("/d/new"), s.host("/d/moved")))
		w.want(t, Change{"/d/new", OpRemove})
		w.want(t, Change{"/d/moved/deep", OpCreate})
		must(t, os.WriteFile(s.host("/d/moved/deep/g"), nil, 0o644))
		w.want(t, Change{"/d/moved/deep/g", OpCreate})
		must(t, os.RemoveAll(s.host("/d/moved")))
		w.want(t, Change{"/d/moved", OpRemove})
		w.stop()
		wantClass(t, <-w.err, dsec.Canceled, "watch")
	})
}

func TestAFlatWatchIsFlatAndEndsWithItsDirectory(t *testing.T) {
	each(t, func(t *testing.T, s service) {
		must(t, os.MkdirAll(s.host("/d/sub"), 0o755))
		must(t, os.Symlink("/d", s.host("/link")))
		w := watch(t, s, "/link", false)
		defer w.stop()
		w.begin(t, "/link")
		must(t, os.WriteFile(s.host("/d/sub/f"), nil, 0o644))
		must(t, os.WriteFile(s.host("/d/g"), nil, 0o644))
		w.want(t, Change{"/link/g", OpCreate})
		if w.seen[Change{"/link/sub/f", OpCreate}] {
			t.Error("saw what is in a subdirectory")
		}
		must(t, os.RemoveAll(s.host("/d")))
		wantClass(t, <-w.err, dsec.FileNotFound)
	})
}

func TestAWatcherThatErrsEndsTheWatch(t *testing.T) {
	each(t, func(t *testing.T, s service) {
		stop := dsec.Errorf(dsec.Canceled, "test", "", "enough")
		for _, op := range []Op{OpWatching, OpCreate} {
			err := s.fs.(Watcher).Watch(t.Context(), "/", false, func(c Change) error {
				if c.Op == op {
					return stop
				}
				return os.WriteFile(s.host("/x-"+string(op)), nil, 0o644)
			})
			if !errors.Is(err, stop) && dsec.ClassOf(err) != dsec.Canceled {
				t.Errorf("ended with %v", err)
			}
		}
	})
	root := newRoot(t)
	err := local(t, root).Watch(t.Context(), "/none", true, nil)
	wantClass(t, err, dsec.FileNotFound)
}

// TestWatchesDoNotKeepOthersOut: what need not end leaves room for what does.
func TestWatchesDoNotKeepOthersOut(t *testing.T) {
	root := newRoot(t)
	s := service{connected(t, local(t, root), unix.SOCK_STREAM), root}
	must(t, os.Mkdir(s.host("/d"), 0o755))
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	refused := make(chan error, 200)
	armed := make(chan struct{}, 200)
	for range 200 {
		running.Go(func() {
			err := s.fs.(Watcher).Watch(ctx, "/d", false, func(Change) error { armed <- struct{}{}; return nil })
			if dsec.ClassOf(err) != dsec.Canceled {
				refused <- err
			}
		})
	}
	for range 200 - maxWatching {
		wantClass(t, <-refused, dsec.ResourceExhausted, "64 watches")
	}
	for range maxWatching {
		<-armed
	}
	if _, err := s.fs.Stat(t.Context(), "/d", true); err != nil {
		t.Error(err)
	}
	cancel()
	running.Wait()
	enough := errors.New("enough")
	for end := time.Now().Add(10 * time.Second); ; { // there is room again, once the other side has let go
		err := s.fs.(Watcher).Watch(t.Context(), "/d", false, func(Change) error { return enough })
		if dsec.ClassOf(err) != dsec.ResourceExhausted {
			break
		}
		if time.Now().After(end) {
			t.Fatal(err)
		}
	}
}

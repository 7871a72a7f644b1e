package rootfs

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/layer"
)

// sessions is a mechanism whose devices are the data themselves.
type sessions struct{ n int }

func (s *sessions) Device(_ context.Context, l layer.Local) (Device, error) {
	s.n++
	return Device{Path: l.Data, Kind: "test", Session: strconv.Itoa(s.n)}, nil
}

// demanded is a layer of which nobody has said that its data are all here.
func demanded(t *testing.T) layer.Local {
	t.Helper()
	l := makeLayer(t, func(d string) { must(t, os.WriteFile(d+"/a", []byte("text"), 0o644)) })
	st, err := os.Stat(l.Data)
	must(t, err)
	l.DataSize = st.Size()
	must(t, os.WriteFile(filepath.Join(filepath.Dir(l.Data), layer.PresentFile), nil, 0o600))
	return l
}

func (e *env) device(t *testing.T, l layer.Local) uint64 {
	t.Helper()
	f, err := e.m.Mounted(l.Digest)
	must(t, err)
	if f == nil {
		return 0
	}
	defer f.Close()
	return deviceOfFile(t, f)
}

// TestARetiredMountIsUsedByNobodyNew: not by another process either, and it goes
// with its last user.
func TestARetiredMountIsUsedByNobodyNew(t *testing.T) {
	everyPlan(t, func(t *testing.T, e *env) {
		ctx, l, by := t.Context(), demanded(t), &sessions{}
		e.m.opts.Devices = by
		use := func(user string) uint64 {
			t.Helper()
			must(t, e.m.Use(ctx, user, []layer.Local{l}))
			return e.device(t, l)
		}
		first := use("a")
		if again := use("b"); again != first || by.n != 1 {
			t.Fatalf("devices %d, %d, %d sessions", first, again, by.n)
		}
		e.m.Retire(l.Digest, "2") // another one
		if d := e.device(t, l); d != first {
			t.Errorf("new users get %d", d)
		}
		e.m.Retire(l.Digest, "1")
		must(t, e.m.Note(ctx, l.Digest))
		must(t, e.m.Note(ctx, l.Digest))
		if d := e.device(t, l); d != 0 {
			t.Errorf("new users get %d", d)
		}
		second := use("c")
		if second == first || by.n != 2 {
			t.Errorf("devices %d, %d, %d sessions", first, second, by.n)
		}
		if got := deviceOfFile(t, e.m.users["a"][0].file); got != first {
			t.Errorf("who had it has %d now, of %d", got, first)
		}
		e.m.Retire(l.Digest, "2") // no third: it would be no better
		if d := e.device(t, l); d != second {
			t.Errorf("after the second failed, too, new users get %d of %d", d, second)
		}
		kept := func(want, wantRetired int) {
			t.Helper()
			names, err := e.keeper.Names(ctx, keptPrefix)
			must(t, err)
			retired, err := e.keeper.Names(ctx, retiredPrefix)
			must(t, err)
			if len(names) != want || len(retired) != wantRetired {
				t.Errorf("kept: %v, %v, want %d, %d", names, retired, want, wantRetired)
			}
		}
		kept(2, 1)
		_, isAttached := e.m.plan.(*attached)
		next := &env{keeper: e.keeper, m: openMounts(t, e.keeper, isAttached, e.m.opts.forceLoop)}
		next.m.opts.Devices = by
		must(t, next.m.Use(ctx, "d", []layer.Local{l}))
		if d := next.device(t, l); d != second || by.n != 2 {
			t.Errorf("the next process gave %d, %d sessions", d, by.n)
		}
		next.m.Unuse("d")
		must(t, next.m.EvictLayer(ctx, l.Digest)) // nobody has named itself to that process
		kept(0, 0)
		e.m.Unuse("a")
		must(t, e.m.Evict(ctx, time.Hour))
		if all := e.m.all(); !slices.ContainsFunc(all, func(x *mounted) bool { return x.by == "1" }) || len(all) != 2 {
			t.Errorf("%d mounts while b and c have two", len(all))
		}
		e.m.Unuse("b")
		must(t, e.m.Evict(ctx, time.Hour))
		if all := e.m.all(); len(all) != 1 || all[0].by != "2" {
			t.Errorf("%d mounts while c has one", len(all))
		}
		e.m.Unuse("c")
	})
}

func TestALostMountIsRetiredAndADissolvedOneIsNotLost(t *testing.T) {
	everyPlan(t, func(t *testing.T, e *env) {
		ctx, l, by := t.Context(), demanded(t), &sessions{}
		e.m.opts.Devices = by
		lost := func(m *Mounts, session string, want bool) {
			t.Helper()
			if got := m.Lost(l.Digest, session); got != want {
				t.Errorf("session %q is lost: %v", session, got)
			}
		}
		must(t, e.m.Use(ctx, "a", []layer.Local{l}))
		lost(e.m, "2", false)
		lost(e.m, "", false)
		_, isAttached := e.m.plan.(*attached)
		lost(openMounts(t, e.keeper, isAttached, e.m.opts.forceLoop), "1", true) // it is in the name
		lost(e.m, "1", true)
		must(t, e.m.Use(ctx, "b", []layer.Local{l}))
		if by.n != 2 {
			t.Errorf("%d sessions", by.n)
		}
		e.m.Unuse("a")
		e.m.Unuse("b")
		must(t, e.m.EvictLayer(ctx, l.Digest))
		lost(e.m, "1", false)
		lost(e.m, "2", false)
	})
}

// failing is a Keeper that cannot keep, or holds up who drops.
type failing struct {
	Keeper
	put  error
	drop chan struct{} // nil: not held up
}

func (f *failing) Put(ctx context.Context, name string, x *os.File) error {
	if f.put != nil {
		return f.put
	}
	return f.Keeper.Put(ctx, name, x)
}

func (f *failing) Drop(ctx context.Context, name string) error {
	if f.drop != nil {
		select {
		case <-f.drop:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return f.Keeper.Drop(ctx, name)
}

// TestALostMountThatCouldNotBeNoted is noted the next time, or found lost by the
// next process, which has no session of it.
func TestALostMountThatCouldNotBeNoted(t *testing.T) {
	everyPlan(t, func(t *testing.T, e *env) {
		ctx, l, by := t.Context(), demanded(t), &sessions{}
		e.m.opts.Devices = by
		must(t, e.m.Use(ctx, "a", []layer.Local{l}))
		_, isAttached := e.m.plan.(*attached)
		next := func(lives bool) *Mounts {
			t.Helper()
			var plan Plan
			var err error
			if plan = Detached(); isAttached {
				plan, err = Attached(ctx, e.keeper)
				must(t, err)
			}
			m, err := Open(ctx, Options{Keeper: e.keeper, Plan: plan, Linger: time.Hour, forceLoop: e.m.opts.forceLoop,
				Lives: func(_ context.Context, d layer.Digest, session string) (bool, error) {
					if d != l.Digest || session != "1" {
						t.Errorf("asked for %s, %q", d, session)
					}
					return lives, nil
				}})
			must(t, err)
			t.Cleanup(func() { must(t, m.Close()) })
			return m
		}
		gives := func(m *Mounts) bool { return m.mounts[l.Digest] != nil }
		full := &failing{Keeper: e.keeper, put: errors.New("no room")}
		e.m.keeper = full
		if !e.m.Lost(l.Digest, "1") || e.m.Note(ctx, l.Digest) == nil || gives(e.m) {
			t.Error("noted, or given to new users")
		}
		if m := next(true); !gives(m) || len(m.LostBefore()) != 0 {
			t.Errorf("one that has its session is lost: %v", m.LostBefore())
		}
		if m := next(false); gives(m) || len(m.LostBefore()) != 1 || m.LostBefore()[0] != l.Digest {
			t.Errorf("one without its session is given to new users, lost: %v", m.LostBefore())
		}
		full.put = nil
		if !e.m.Lost(l.Digest, "1") {
			t.Error("not lost when it is told again")
		}
		must(t, e.m.Note(ctx, l.Digest))
		if m := next(false); gives(m) || len(m.LostBefore()) != 0 {
			t.Errorf("one that is noted is lost again: %v", m.LostBefore())
		}
		e.m.Unuse("a")
	})
}

// TestNobodyWaitsForAMountThatIsHeldUp while it is dissolved, but who unmounts the
// same layer.
func TestNobodyWaitsForAMountThatIsHeldUp(t *testing.T) {
	everyPlan(t, func(t *testing.T, e *env) {
		ctx, l, other, by := t.Context(), demanded(t), demanded(t), &sessions{}
		e.m.opts.Devices = by
		must(t, e.m.Use(ctx, "a", []layer.Local{l}))
		e.m.Unuse("a")
		slow := &failing{Keeper: e.keeper, drop: make(chan struct{})}
		e.m.keeper = slow
		first, second := make(chan error, 1), make(chan error, 1)
		go func() { first <- e.m.EvictLayer(ctx, l.Digest) }()
		for { // until it is on its way
			e.m.mu.Lock()
			n := len(e.m.leaving)
			e.m.mu.Unlock()
			if n == 1 {
				break
			}
			runtime.Gosched()
		}
		go func() { second <- e.m.EvictLayer(ctx, l.Digest) }()
		must(t, e.m.Use(ctx, "b", []layer.Local{other}))
		e.m.Unuse("b")
		short, cancel := context.WithTimeout(ctx, 10*time.Millisecond)
		defer cancel()
		if err := e.m.EvictLayer(short, l.Digest); err == nil {
			t.Error("unmounted, but it is not gone")
		}
		must(t, e.m.Use(ctx, "c", []layer.Local{l})) // gets another mount
		if by.n != 3 {
			t.Errorf("%d sessions", by.n)
		}
		close(slow.drop)
		must(t, <-first)
		if err := <-second; err != nil && !errors.Is(err, dsec.IllegalState.Err()) {
			t.Error(err)
		}
		e.m.Unuse("c")
	})
}

// TestTheCacheOfARetiredMountIsDropped where the next reads the same file.
func TestTheCacheOfARetiredMountIsDropped(t *testing.T) {
	everyPlan(t, func(t *testing.T, e *env) {
		ctx, l := t.Context(), demanded(t)
		must(t, os.WriteFile(l.Data, make([]byte, 1<<20), 0o600))
		var st unix.Statfs_t
		must(t, unix.Statfs(l.Data, &st))
		if st.Type == unix.TMPFS_MAGIC || st.Type == unix.RAMFS_MAGIC {
			t.Skipf("%s is in memory (file system %#x): its pages are the file", l.Data, st.Type)
		}
		e.m.opts.Devices = oneFile{}
		cached := func() (n int) {
			t.Helper()
			f, err := os.Open(l.Data)
			must(t, err)
			defer f.Close()
			b, err := unix.Mmap(int(f.Fd()), 0, 1<<20, unix.PROT_READ, unix.MAP_SHARED)
			must(t, err)
			defer func() { must(t, unix.Munmap(b)) }()
			pages := make([]byte, (1<<20)/os.Getpagesize())
			if _, _, errno := unix.Syscall(unix.SYS_MINCORE, uintptr(unsafe.Pointer(&b[0])), 1<<20, uintptr(unsafe.Pointer(&pages[0]))); errno != 0 {
				t.Fatal(errno)
			}
			for _, p := range pages {
				n += int(p & 1)
			}
			return n
		}
		must(t, e.m.Use(ctx, "a", []layer.Local{l}))
		_, err := os.ReadFile(l.Data)
		must(t, err)
		was := cached()
		e.m.Retire(l.Digest, "")
		must(t, e.m.Use(ctx, "b", []layer.Local{l}))
		if now := cached(); was < 100 || now > was/10 {
			t.Errorf("%d pages are cached, %d before", now, was)
		}
		e.m.Unuse("a")
		e.m.Unuse("b")
	})
}

// oneFile is a mechanism by which all mounts of a layer read one file.
type oneFile struct{}

func (oneFile) Device(_ context.Context, l layer.Local) (Device, error) {
	return Device{Path: l.Data, Kind: "test"}, nil
}

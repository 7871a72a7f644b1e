package rootfs

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"testing"
	"time"

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
		must(t, e.m.Retire(ctx, l.Digest))
		must(t, e.m.Retire(ctx, l.Digest))
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
		must(t, e.m.Retire(ctx, l.Digest)) // the second, too
		kept := func(want int) {
			t.Helper()
			names, err := e.keeper.Names(ctx, keptPrefix)
			must(t, err)
			retired, err := e.keeper.Names(ctx, retiredPrefix)
			must(t, err)
			if len(names) != want || len(retired) != want {
				t.Errorf("kept: %v, %v, want %d", names, retired, want)
			}
		}
		kept(2)
		_, isAttached := e.m.plan.(*attached)
		next := &env{keeper: e.keeper, m: openMounts(t, e.keeper, isAttached, e.m.opts.forceLoop)}
		next.m.opts.Devices = by
		if d := next.device(t, l); d != 0 {
			t.Errorf("the next process gives %d to new users", d)
		}
		must(t, next.m.Use(ctx, "d", []layer.Local{l}))
		if d := next.device(t, l); d == first || d == second || by.n != 3 {
			t.Errorf("the next process gave %d, %d sessions", d, by.n)
		}
		next.m.Unuse("d")
		must(t, next.m.EvictLayer(ctx, l.Digest)) // nobody has named itself to that process
		kept(0)
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
			if got, err := m.Lost(ctx, l.Digest, session); err != nil || got != want {
				t.Errorf("session %q is lost: %v, %v", session, got, err)
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

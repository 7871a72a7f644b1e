package function

import (
	"context"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/runtime"
)

func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	late := time.After(10 * time.Second)
	for !ok() {
		select {
		case <-tick.C:
		case <-late:
			t.Fatalf("not within 10 s: %s", what)
		}
	}
}

// doubtful is a tier whose cells are, now and then, not known to be clean.
type doubtful struct {
	Mechanism
	doubt atomic.Bool
}

type doubtfulCells struct {
	runtime.Cells
	m *doubtful
}

func (d *doubtful) Cells(ctx context.Context, id dsec.SandboxID, s runtime.CellSpec) (runtime.Cells, error) {
	c, err := d.Mechanism.Cells(ctx, id, s)
	return doubtfulCells{c, d}, err
}

func (c doubtfulCells) Settle(ctx context.Context) bool {
	return c.Cells.Settle(ctx) && !c.m.doubt.Load()
}

// rest waits until no container has anything to do.
func (w *world) rest(t testing.TB) {
	t.Helper()
	eventually(t, "all containers wait", func() bool {
		w.e.mu.Lock()
		defer w.e.mu.Unlock()
		for _, p := range w.e.pools {
			if len(p.idle) != p.live {
				return false
			}
		}
		return true
	})
}

// TestPools has one machine for all that is about containers.
func TestPools(t *testing.T) {
	d := &doubtful{}
	w := newWorld(t, func(c *Config) {
		d.Mechanism = c.Mechanism
		c.Mechanism, c.PerPool, c.Most = d, 2, 3
	})
	ctx := context.Background()
	t.Run("a container that is not proved clean is destroyed", func(t *testing.T) {
		a := w.call(t, shell("true"))
		w.rest(t)
		if b := w.call(t, shell("true")); b.Container != a.Container || b.Use != 2 {
			t.Fatalf("not used again: %+v", b)
		}
		w.rest(t)
		d.doubt.Store(true)
		if b := w.call(t, shell("echo x")); b.Container != a.Container || b.Verdict != dsec.VerdictOK || string(b.Stdout) != "x\n" {
			t.Errorf("%+v", b)
		}
		w.rest(t)
		d.doubt.Store(false)
		if b := w.call(t, shell("true")); b.Container == a.Container || b.Generation != 2 {
			t.Errorf("used again: %+v", b)
		}
		eventually(t, "it is gone", func() bool {
			list, err := w.tier.List(ctx)
			return err == nil && len(list) == 1 && list[0].ID != a.Container
		})
	})
	t.Run("a call whose container is lost is made again", func(t *testing.T) {
		w.rest(t)
		a := w.call(t, shell("true"))
		w.rest(t)
		must(t, w.hold.KillSandbox(ctx, string(a.Container)))
		if b := w.call(t, shell("echo again")); string(b.Stdout) != "again\n" || b.Container == a.Container {
			t.Errorf("%+v", b)
		}
	})
	t.Run("and so it is if all that wait are lost", func(t *testing.T) {
		var wg sync.WaitGroup
		for range 2 {
			wg.Go(func() { w.call(t, shell("sleep 0.1")) })
		}
		wg.Wait()
		w.rest(t)
		list, err := w.tier.List(ctx)
		must(t, err)
		for _, s := range list {
			must(t, w.hold.KillSandbox(ctx, string(s.ID)))
		}
		if b := w.call(t, shell("echo again")); len(list) < 2 || string(b.Stdout) != "again\n" {
			t.Errorf("%d containers, %+v", len(list), b)
		}
	})
	t.Run("calls wait, and all are made", func(t *testing.T) {
		var wg sync.WaitGroup
		in := map[dsec.SandboxID]bool{}
		var mu sync.Mutex
		for range 12 {
			wg.Go(func() {
				r, err := w.try(shell("sleep 0.02"))
				if err != nil || r.Verdict != dsec.VerdictOK {
					t.Error(r, err)
				}
				mu.Lock()
				in[r.Container] = true
				mu.Unlock()
			})
		}
		wg.Wait()
		if len(in) != 2 {
			t.Errorf("%d containers, want 2", len(in))
		}
	})
}

// TestPoolsOfOneNode has several, of which not all have room.
func TestPoolsOfOneNode(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.PerPool, c.Most = 2, 3 })
	ctx := context.Background()
	t.Run("another pool gets the place of who waits", func(t *testing.T) {
		for _, l := range []int64{64 << 20, 65 << 20, 66 << 20, 67 << 20} {
			c := shell("true")
			c.Limits.Memory = l
			w.call(t, c)
		}
		if n := w.e.Counts().Containers; n > 3 {
			t.Errorf("%d containers, want 3 at most", n)
		}
	})
	t.Run("a full node makes do with what there is", func(t *testing.T) {
		eventually(t, "what goes has gone", func() bool { return w.source.live.Load() == w.e.Counts().Containers })
		w.source.most = w.source.live.Load()
		defer func() { w.source.most = 0 }()
		c := shell("sleep 0.05")
		c.Limits.Memory = 67 << 20
		var wg sync.WaitGroup
		for range 3 {
			wg.Go(func() {
				if r, err := w.try(c); err != nil || r.Verdict != dsec.VerdictOK {
					t.Error(r, err)
				}
			})
		}
		wg.Wait()
	})
	t.Run("a full node removes what waits for others", func(t *testing.T) {
		for _, l := range []int64{70 << 20, 71 << 20, 72 << 20} { // each time of the one before
			c := shell("true")
			c.Limits.Memory = l
			w.call(t, c)
			w.rest(t)
			eventually(t, "what goes has gone", func() bool { return w.source.live.Load() == w.e.Counts().Containers })
			w.source.most = w.source.live.Load()
		}
		w.source.most = 0
	})
	t.Run("a full node is not asked again and again", func(t *testing.T) {
		eventually(t, "what goes has gone", func() bool { return w.source.live.Load() == w.e.Counts().Containers })
		c := shell("sleep 0.3")
		c.Limits.Memory = 72 << 20 // there is one
		w.source.most = w.source.live.Load()
		defer func() { w.source.most = 0 }()
		before := w.source.asked.Load()
		var wg sync.WaitGroup
		for range 5 {
			wg.Go(func() {
				if r, err := w.try(c); err != nil || r.Verdict != dsec.VerdictOK {
					t.Error(r, err)
				}
			})
		}
		wg.Wait()
		if n := w.source.asked.Load() - before; n > 50 {
			t.Errorf("the node was asked %d times for room for 5 calls", n)
		}
	})
	t.Run("what cannot be had is said", func(t *testing.T) {
		c := shell("true")
		c.Image = "missing"
		if _, err := w.try(c); dsec.ClassOf(err) != dsec.NotFound {
			t.Error(err)
		}
		p := python("1")
		p.Preload = []string{"of_nobody"}
		if _, err := w.try(p); dsec.ClassOf(err) != dsec.Invalid || !strings.Contains(err.Error(), "of_nobody") {
			t.Error(err)
		}
		p.Preload = []string{"json", "re"}
		p.Code = []byte("import sys; print('json' in sys.modules)")
		if r := w.call(t, p); string(r.Stdout) != "True\n" {
			t.Errorf("%+v", r)
		}
		if _, err := w.try(dsec.Call{Type: dsec.CallWasm, Code: []byte("x")}); dsec.ClassOf(err) != dsec.Unsupported {
			t.Error(err)
		}
	})
	t.Run("another project has another container", func(t *testing.T) {
		c := shell("true")
		c.Image = "base"
		c.Fill()
		a, err := w.e.Call(ctx, "p", c)
		must(t, err)
		b, err := w.e.Call(ctx, "q", c)
		must(t, err)
		if a.Container == b.Container {
			t.Error("they share one")
		}
	})
}

func TestContainersGoWhenNobodyCalls(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.Idle = 30 * time.Millisecond })
	w.call(t, shell("true"))
	eventually(t, "none is left", func() bool {
		list, err := w.tier.List(context.Background())
		return err == nil && len(list) == 0
	})
	w.call(t, shell("true")) // and comes back
	// The end of the engine ends calls.
	var wg sync.WaitGroup
	wg.Go(func() {
		if r, err := w.try(shell("sleep 60")); err == nil {
			t.Errorf("%+v", r)
		}
	})
	eventually(t, "it runs", func() bool { return w.e.Counts().Calls == 3 && w.e.Counts().Containers > 0 })
	begun := time.Now()
	must(t, w.e.Close())
	wg.Wait()
	if time.Since(begun) > 5*time.Second {
		t.Error("it took", time.Since(begun))
	}
}

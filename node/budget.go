package node

import (
	"context"
	"fmt"
	"math"
	"sync"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/sizes"
)

// budget counts what was promised to sandboxes.
type budget struct {
	lim Budgets

	mu     sync.Mutex
	cpu    float64
	memory int64
	disk   int64
	live   int
}

// share is what a sandbox holds of the budget: run while it has processes, disk
// until it is deleted.
type share struct{ run, disk bool }

func (g *budget) cpuLimit() float64  { return g.lim.CPU * g.lim.CPUFactor }
func (g *budget) memoryLimit() int64 { return scaled(g.lim.Memory, g.lim.MemoryFactor) }
func (g *budget) diskLimit() int64   { return scaled(g.lim.Disk, g.lim.DiskFactor) }

func scaled(n int64, factor float64) int64 {
	f := float64(n) * factor
	if f >= math.MaxInt64 { // the conversion is not defined there
		return math.MaxInt64
	}
	return int64(f)
}

// charged is what a sandbox counts for. A ledger may hold limits from before
// there was a most: they must not make the sums of the others wrap around.
func charged(l dsec.Limits) dsec.Limits {
	l.Memory, l.Disk = min(l.Memory, dsec.MaxBytes), min(l.Disk, dsec.MaxBytes)
	return l
}

// more is a sum of two that are not negative, at most what fits.
func more(a, b int64) int64 {
	if a > math.MaxInt64-b {
		return math.MaxInt64
	}
	return a + b
}

// take adds want to have, or says what is short.
func (g *budget) take(l dsec.Limits, have *share, want share) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	l = charged(l)
	short := ""
	run := want.run && !have.run
	switch {
	case run && g.live+1 > g.lim.MaxLive:
		short = fmt.Sprintf("%d sandboxes are live, at most %d (node.max_live)", g.live, g.lim.MaxLive)
	case run && g.cpu+l.CPU > g.cpuLimit():
		short = fmt.Sprintf("cpu: %g cores asked, %g of %g promised", l.CPU, g.cpu, g.cpuLimit()) + "; ask for less (--cpu), stop what is not needed, or set a larger node.cpu_overcommit"
	case run && more(g.memory, l.Memory) > g.memoryLimit():
		short = promised("memory", l.Memory, g.memory, g.memoryLimit()) + "; ask for less (--memory), stop what is not needed, or set a larger node.mem_overcommit"
	case want.disk && !have.disk && more(g.disk, l.Disk) > g.diskLimit():
		short = promised("disk", l.Disk, g.disk, g.diskLimit()) + "; ask for less (--disk), delete what is not needed, or set a larger node.disk_pool"
	}
	if short != "" {
		return dsec.Errorf(dsec.ResourceExhausted, "admit sandbox", "", "%s", short)
	}
	g.addLocked(l, have, want)
	return nil
}

func promised(what string, asked, have, limit int64) string {
	return fmt.Sprintf("%s: %s asked, %s of %s promised", what, sizes.Text(asked), sizes.Text(have), sizes.Text(limit))
}

// force is take for what is there already.
func (g *budget) force(l dsec.Limits, have *share, want share) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.addLocked(charged(l), have, want)
}

func (g *budget) addLocked(l dsec.Limits, have *share, want share) {
	if want.run && !have.run {
		g.cpu, g.memory, g.live, have.run = g.cpu+l.CPU, more(g.memory, l.Memory), g.live+1, true
	}
	if want.disk && !have.disk {
		g.disk, have.disk = more(g.disk, l.Disk), true
	}
}

// give takes back what is held and not in keep.
func (g *budget) give(l dsec.Limits, have *share, keep share) {
	g.mu.Lock()
	defer g.mu.Unlock()
	l = charged(l)
	if have.run && !keep.run {
		g.cpu, g.memory, g.live, have.run = g.cpu-l.CPU, max(0, g.memory-l.Memory), g.live-1, false
	}
	if have.disk && !keep.disk {
		g.disk, have.disk = max(0, g.disk-l.Disk), false
	}
	if g.live == 0 {
		g.cpu = 0 // no rounding errors pile up
	}
}

func (g *budget) load() Load {
	g.mu.Lock()
	defer g.mu.Unlock()
	return Load{Live: g.live, MaxLive: g.lim.MaxLive, CPU: g.cpu / g.cpuLimit(),
		Memory: float64(g.memory) / float64(g.memoryLimit()), Disk: float64(g.disk) / float64(g.diskLimit())}
}

// starts limits how many creations and starts are at work at once: beyond the
// cores of a machine more of them only make each slower.
type starts struct {
	slots chan struct{}
	queue int // most that wait

	mu      sync.Mutex
	waiting int
}

func newStarts(limit, queue int) *starts {
	return &starts{slots: make(chan struct{}, limit), queue: queue}
}

// enter waits for a slot.
func (s *starts) enter(ctx context.Context) error {
	s.mu.Lock()
	if s.waiting >= s.queue {
		n := s.waiting
		s.mu.Unlock()
		return dsec.Errorf(dsec.ResourceExhausted, "admit sandbox", "", "%d creations wait already", n)
	}
	s.waiting++
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.waiting--
	}()
	select {
	case s.slots <- struct{}{}:
		return nil
	case <-ctx.Done():
		return dsec.E(dsec.ClassOf(ctx.Err()), "wait for a start slot", "", context.Cause(ctx))
	}
}

func (s *starts) leave() { <-s.slots }

func (s *starts) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.waiting + len(s.slots)
}

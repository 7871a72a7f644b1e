package node

import (
	"math"
	"testing"

	"github.com/opendsec/dsec"
)

// TestTheBudgetHoldsWithExtremeLimits: limits from before there was a most must
// neither be admitted nor make room for others.
func TestTheBudgetHoldsWithExtremeLimits(t *testing.T) {
	g := &budget{lim: Budgets{CPU: 4, CPUFactor: 10, Memory: 1 << 34, MemoryFactor: 10, Disk: 1 << 40, DiskFactor: 32, MaxLive: 100}}
	all := share{run: true, disk: true}
	small := dsec.Limits{CPU: 1, Memory: 1 << 30, Disk: 1 << 30}
	for _, l := range []dsec.Limits{{CPU: 1, Memory: math.MaxInt64}, {CPU: 1, Disk: math.MaxInt64}, {CPU: 1, Memory: dsec.MaxBytes},
		{CPU: math.Inf(1)}, {CPU: 1e300}} {
		var have, next share
		if err := g.take(small, &have, all); err != nil {
			t.Fatal(err)
		}
		if err := g.take(l, &next, all); dsec.ClassOf(err) != dsec.ResourceExhausted {
			t.Errorf("%+v after another: %v", l, err)
		}
		var old [3]share // as found in a ledger
		for i := range old {
			g.force(l, &old[i], all)
		}
		if err := g.take(small, &next, all); dsec.ClassOf(err) != dsec.ResourceExhausted {
			t.Errorf("%+v beside %+v: %v", small, l, err)
		}
		for i := range old {
			g.give(l, &old[i], share{})
		}
		if g.memory != small.Memory || g.disk != small.Disk {
			t.Errorf("%+v beside %+v left %d, %d", l, small, g.memory, g.disk)
		}
		g.give(small, &have, share{})
		if g.memory != 0 || g.disk != 0 || g.cpu != 0 || g.live != 0 {
			t.Errorf("%+v left %d, %d, %g, %d", l, g.memory, g.disk, g.cpu, g.live)
		}
	}
	if more(math.MaxInt64, 1) != math.MaxInt64 || more(math.MaxInt64, math.MaxInt64) != math.MaxInt64 || more(2, 3) != 5 {
		t.Error("a sum wraps around")
	}
	g.lim.MemoryFactor = 1e300
	if g.memoryLimit() != math.MaxInt64 {
		t.Errorf("limit %d", g.memoryLimit())
	}
}

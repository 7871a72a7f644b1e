package node

import (
	"math"
	"strings"
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

// TestWhatIsShortIsSaidForPeople, and what can be done about it.
func TestWhatIsShortIsSaidForPeople(t *testing.T) {
	lim := Budgets{CPU: 1, CPUFactor: 2, Memory: 1 << 30, MemoryFactor: 2, Disk: 21 << 30, DiskFactor: 1, MaxLive: 6}
	one := dsec.Limits{CPU: 0.25, Memory: 64 << 20, Disk: 4 << 30}
	for want, l := range map[string]dsec.Limits{
		"disk: 4.0 GiB asked, 20.0 GiB of 21.0 GiB promised; ask for less (--disk), delete what is not needed, or set a larger node.disk_pool": one,
		"memory: 4.0 GiB asked, 320 MiB of 2.0 GiB promised; ask for less (--memory)":                                                          {CPU: 0.25, Memory: 4 << 30},
		"cpu: 1 cores asked, 1.25 of 2 promised; ask for less (--cpu)":                                                                         {CPU: 1},
	} {
		g := &budget{lim: lim}
		for range 5 {
			if err := g.take(one, &share{}, share{run: true, disk: true}); err != nil {
				t.Fatal(err)
			}
		}
		err := g.take(l, &share{}, share{run: true, disk: true})
		if dsec.ClassOf(err) != dsec.ResourceExhausted || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
}

package agent

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const damonFiles = "kernel/mm/damon/admin/kdamonds"

// fakeDAMON adds it to a kernel: its files are there, and nothing happens.
func fakeDAMON(t *testing.T, k kernelFiles) {
	t.Helper()
	for _, dir := range []string{"monitoring_attrs/intervals", "monitoring_attrs/nr_regions", "targets/0/regions/0", "targets/0/regions/1", "schemes/0/access_pattern/sz",
		"schemes/0/access_pattern/nr_accesses", "schemes/0/access_pattern/age", "schemes/0/quotas", "schemes/0/filters/0", "schemes/0/stats"} {
		must(t, os.MkdirAll(filepath.Join(k.sys, damonFiles, "0/contexts/0", dir), 0o755))
	}
	must(t, os.WriteFile(filepath.Join(k.sys, damonFiles, "nr_kdamonds"), []byte("0\n"), 0o644))
	applied(t, k, 0)
	must(t, os.WriteFile(filepath.Join(k.proc, "iomem"), []byte("00001000-0009fbff : System RAM\n000a0000-000fffff : Reserved\n00100000-0fffffff : System RAM\n"+
		"  01000000-01ffffff : Kernel code\n140000000-1403fffff : Persistent Memory\n"), 0o644))
}

func applied(t *testing.T, k kernelFiles, n int64) {
	t.Helper()
	must(t, os.WriteFile(filepath.Join(k.sys, damonFiles, "0/contexts/0/schemes/0/stats/sz_applied"), fmt.Appendln(nil, n), 0o644))
}

// watched is an agent with a sandbox, on a kernel with DAMON.
func watched(t *testing.T) (kernelFiles, *Agent, func(name string) string) {
	k := fakeKernel(t)
	fakeDAMON(t, k)
	a := newAgent(t.TempDir(), "", slog.New(slog.DiscardHandler))
	a.damon.kernelFiles = k
	a.lookForHost(k)
	a.sandbox, a.resumed = &sandbox{done: make(chan struct{})}, true
	return k, a, func(name string) string { return textOf(t, filepath.Join(k.sys, damonFiles, name)) }
}

// A kernel that takes what nobody accesses has the work to itself, as long as the machine is calm.
func TestTheKernelWatchesMemory(t *testing.T) {
	k, a, damon := watched(t)
	var age aging
	must(t, a.giveBackOnce(k, &age))
	must(t, a.giveBackOnce(k, &age))
	const scheme = "0/contexts/0/schemes/0/"
	for name, want := range map[string]string{"0/state": "on", scheme + "action": "pageout", scheme + "access_pattern/age/min": "20", scheme + "filters/0/type": "anon",
		"0/contexts/0/targets/0/regions/nr_regions": "2", "0/contexts/0/targets/0/regions/1/start": "1048576", "0/contexts/0/targets/0/regions/1/end": "268435456"} {
		if got := damon(name); got != want {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
	for n := range int64(3 * damonTrial) {
		if n%3 == 0 { // not in each round
			applied(t, k, 7*n*mib)
		}
		must(t, a.giveBackOnce(k, &age))
	}
	if got := textOf(t, filepath.Join(k.groups, "memory.reclaim")); got != "" || !a.damon.on {
		t.Errorf("%q was taken beside it", got)
	}
	stall := "some avg10=90.00 avg60=0.00 avg300=0.00 total=9000000\n"
	must(t, os.WriteFile(filepath.Join(k.proc, "pressure/memory"), []byte(stall), 0o644))
	must(t, a.giveBackOnce(k, &age))
	if damon("0/state") != "off" || damon("nr_kdamonds") != "0" {
		t.Error("it takes from a machine that waits for memory")
	}
	must(t, a.giveBackOnce(k, &age))
	if damon("0/state") != "on" {
		t.Error("it is not on again")
	}
	must(t, a.damon.stop()) // as freeze does
	a.frozen = true
	for range 3 {
		must(t, a.giveBackOnce(k, &age))
	}
	if damon("0/state") != "off" {
		t.Error("it is on in a machine that stands still")
	}
}

// Whoever switched it on switches it off before he goes.
func TestNobodyWatchesWithoutTheAgent(t *testing.T) {
	k, a, damon := watched(t)
	var age aging
	for range 2 {
		must(t, a.giveBackOnce(k, &age))
	}
	if damon("0/state") != "on" {
		t.Fatal("it is not on")
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for range 20 { // either of two that are over may be seen first
		a.giveBack(ctx, k)
		if damon("0/state") == "off" && damon("nr_kdamonds") == "0" {
			return
		}
	}
	t.Error("it is still on")
}

// What an agent that was killed has left on, the next one knows as its own.
func TestTheNextAgentTakesOver(t *testing.T) {
	k, a, file := watched(t)
	var age aging
	for range 2 {
		must(t, a.giveBackOnce(k, &age))
	}
	if file("0/state") != "on" {
		t.Fatal("it is not on")
	}
	next := damon{kernelFiles: k, log: slog.New(slog.DiscardHandler)}
	if next.look(); next.unfit || file("0/state") != "off" || file("nr_kdamonds") != "0" {
		t.Errorf("%+v, state %s", next, file("0/state"))
	}
	must(t, next.start())
	must(t, next.stop())
	must(t, os.WriteFile(filepath.Join(k.sys, damonFiles, "nr_kdamonds"), []byte("1\n"), 0o644))
	if next.look(); !next.unfit || file("nr_kdamonds") != "1\n" {
		t.Errorf("somebody else's was switched off: %+v", next)
	}
}

// One that takes next to nothing of what is old is put away after its trial, and memory.reclaim takes it.
func TestAKernelThatWatchesInVain(t *testing.T) {
	k, a, damon := watched(t)
	reclaim := filepath.Join(k.groups, "memory.reclaim")
	var age aging
	rounds := 0
	for ; textOf(t, reclaim) == "" && rounds < 100; rounds++ {
		applied(t, k, int64(rounds)*mib)
		must(t, a.giveBackOnce(k, &age))
	}
	if want := 1 + reclaimAge + damonTrial; rounds != want || !a.damon.unfit || damon("0/state") != "off" || damon("nr_kdamonds") != "0" {
		t.Errorf("after %d rounds, want %d: %+v", rounds, want, a.damon)
	}
}

func TestAKernelWhoseDAMONIsTaken(t *testing.T) {
	k, a, damon := watched(t)
	must(t, os.WriteFile(filepath.Join(k.sys, damonFiles, "nr_kdamonds"), []byte("1\n"), 0o644))
	a.damon.look()
	var age aging
	for range 2 + reclaimAge {
		must(t, a.giveBackOnce(k, &age))
	}
	if damon("nr_kdamonds") != "1\n" || textOf(t, filepath.Join(k.groups, "memory.reclaim")) == "" {
		t.Errorf("somebody else's DAMON was used: %+v", a.damon)
	}
}

// What is written is what a kernel understands: this machine's is told all of it, and never started.
func TestThisKernelUnderstands(t *testing.T) {
	d := damon{kernelFiles: machineFiles, log: slog.New(slog.DiscardHandler)}
	if os.Geteuid() != 0 {
		t.Skip("DAMON is root's, and this test runs without it")
	}
	if d.look(); d.unfit {
		b, err := os.ReadFile(d.at("nr_kdamonds"))
		t.Skipf("this kernel has no DAMON to itself: nr_kdamonds is %q, %v", b, err)
	}
	defer func() { must(t, d.set("nr_kdamonds", "0")) }()
	must(t, d.prepare())
	for name, want := range map[string]string{"action": "pageout", "access_pattern/age/min": "20", "quotas/bytes": fmt.Sprint(reclaimMost), "filters/0/type": "anon", "filters/0/matching": "Y"} {
		b, err := os.ReadFile(d.at("0/contexts/0/schemes/0/" + name))
		if err != nil || strings.TrimSpace(string(b)) != want {
			t.Errorf("%s is %q, %v, want %s", name, b, err, want)
		}
	}
}

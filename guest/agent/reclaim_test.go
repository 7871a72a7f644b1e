package agent

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"
)

const mib = 1 << 20

// look is a round, in which what is old is taken.
func look(a *aging, u usage) int64 {
	if !a.calm(u) {
		return 0
	}
	n := a.old(u)
	if n > 0 {
		a.taken = n
	}
	return n
}

// rounds shows one usage after the other to an aging, and returns what it gave back in each.
func rounds(a *aging, all ...usage) (took []int64) {
	for _, u := range all {
		took = append(took, look(a, u)/mib)
	}
	return took
}

func same(n int, u usage) (all []usage) {
	for range n {
		all = append(all, u)
	}
	return all
}

func wantRounds(t *testing.T, what string, got []int64, want ...int64) {
	t.Helper()
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("%s: %d MiB in the rounds, want %d", what, got, want)
	}
}

// What was there for some rounds goes, half of it at a time and never all; what came just now stays.
func TestFilesThatAreOldGo(t *testing.T) {
	idle := usage{files: 44 * mib}
	wantRounds(t, "idle", rounds(&aging{}, same(6, idle)...), 0, 0, 0, 0, 20, 20)
	wantRounds(t, "huge", rounds(&aging{}, same(5, usage{files: 1 << 30})...), 0, 0, 0, 0, 64)
	wantRounds(t, "little", rounds(&aging{}, same(6, usage{files: 5 * mib})...), 0, 0, 0, 0, 0, 0)
	var a aging
	wantRounds(t, "young", rounds(&a, append(same(4, idle), usage{files: 444 * mib})...), 0, 0, 0, 0, 20)
	wantRounds(t, "and then", rounds(&a, same(3, usage{files: 424 * mib})...), 20, 20, 64)
}

// A machine that waits for memory or a disk is busy: everything in it is young again.
func TestABusyMachineIsLeftAlone(t *testing.T) {
	for what, busy := range map[string]func(*usage){
		"memory": func(u *usage) { u.memory += 2 * stallMemory },
		"disk":   func(u *usage) { u.disk += 2 * stallDisk },
	} {
		var a aging
		u := usage{files: 44 * mib, memory: time.Hour, disk: time.Hour}
		wantRounds(t, what+", before", rounds(&a, same(4, u)...), 0, 0, 0, 0)
		for range 3 {
			busy(&u)
			wantRounds(t, what, rounds(&a, u), 0)
		}
		wantRounds(t, what+", after", rounds(&a, same(4, u)...), 0, 0, 0, 20)
	}
}

// What was taken and was needed all the same is not taken again soon, and each time later.
func TestWhatWasNeededIsTakenLater(t *testing.T) {
	var a aging
	u := usage{files: 44 * mib}
	rests := []int{}
	for n, last := 0, 0; len(rests) < 6 && n < 10000; n++ {
		if took := look(&a, u); took > 0 {
			rests, last = append(rests, n-last), n
			u.refaults += took
		}
	}
	if fmt.Sprint(rests) != "[4 8 12 20 36 68]" {
		t.Errorf("rounds between: %d", rests)
	}
	for range 10 {
		if took := look(&a, u); took > 0 {
			t.Fatal("it does not rest")
		}
	}
	for n := 0; a.wait > 0 && n < 10000; n++ { // what is taken now is not needed
		if took := look(&a, u); took > 0 {
			u.files -= took
		}
	}
	if a.wait > 0 {
		t.Error("it never forgets that once something was needed")
	}
}

// fakeKernel is what the kernel says, with 100 MiB of files in memory.
func fakeKernel(t *testing.T) kernelFiles {
	dir := t.TempDir()
	pages := 100 * mib / os.Getpagesize()
	for name, text := range map[string]string{
		"proc/vmstat":          fmt.Sprintf("nr_inactive_anon 7\nnr_inactive_file %d\nnr_active_file %d\nworkingset_refault_anon 3\nworkingset_refault_file 2\n", pages/2, pages/2),
		"proc/pressure/memory": "some avg10=0.00 avg60=0.00 avg300=0.00 total=1500000\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=7\n",
		"proc/pressure/io":     "some avg10=0.00 avg60=0.00 avg300=0.00 total=12\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n",
		"sys/bus/virtio/drivers/virtio_balloon/virtio3/features":    "0100010000000000000000000000110010000000000000000000000000000000\n",
		"sys/module/page_reporting/parameters/page_reporting_order": "9\n",
		"groups/memory.reclaim":                                     "",
	} {
		must(t, os.MkdirAll(filepath.Join(dir, filepath.Dir(name)), 0o755))
		must(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644))
	}
	return kernelFiles{proc: dir + "/proc", sys: dir + "/sys", groups: dir + "/groups", own: dir}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func textOf(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	must(t, err)
	return string(b)
}

func TestTheKernelsWordsAreRead(t *testing.T) {
	k := fakeKernel(t)
	u, err := k.usage()
	want := usage{files: 100 * mib, refaults: 2 * int64(os.Getpagesize()), memory: 1500 * time.Millisecond, disk: 12 * time.Microsecond}
	if err != nil || u != want {
		t.Errorf("%+v, %v, want %+v", u, err, want)
	}
	a := newAgent(t.TempDir(), "", slog.New(slog.DiscardHandler))
	features := filepath.Join(k.sys, "bus/virtio/drivers/virtio_balloon/virtio3/features")
	with := textOf(t, features)
	must(t, os.WriteFile(features, []byte("01000000000000000000000000001100"), 0o644))
	a.lookForHost(k)
	select {
	case <-a.reports:
		t.Error("a balloon that reports nothing")
	default:
	}
	must(t, os.WriteFile(features, []byte(with), 0o644))
	a.lookForHost(k)
	a.lookForHost(k) // as each resume does
	select {
	case <-a.reports:
	default:
		t.Error("a balloon that reports was not found")
	}
	if got := textOf(t, filepath.Join(k.sys, "module/page_reporting/parameters/page_reporting_order")); got != "2" {
		t.Errorf("order %q", got)
	}
	must(t, os.Remove(filepath.Join(k.proc, "pressure/io")))
	if _, err := k.usage(); err == nil {
		t.Error("a kernel that does not say who waits for the disk")
	}
}

// Nothing is taken, and nothing gets old, while the sandbox is frozen; nor before there is one.
func TestNothingIsTakenOfAFrozenSandbox(t *testing.T) {
	k := fakeKernel(t)
	a := newAgent(t.TempDir(), "", slog.New(slog.DiscardHandler))
	reclaim := filepath.Join(k.groups, "memory.reclaim")
	var age aging
	run := func(n int) string {
		t.Helper()
		for range n {
			must(t, a.giveBackOnce(k, &age))
		}
		got := textOf(t, reclaim)
		must(t, os.WriteFile(reclaim, nil, 0o644))
		return got
	}
	if got := run(10); got != "" {
		t.Errorf("before there is a sandbox: %q", got)
	}
	a.sandbox, a.resumed = &sandbox{done: make(chan struct{})}, true
	if got := run(5); got != fmt.Sprint(48*mib) {
		t.Errorf("%q of 100 MiB", got)
	}
	a.frozen = true
	if got := run(20); got != "" {
		t.Errorf("frozen: %q", got)
	}
	a.frozen = false
	if got := run(4); got != "" {
		t.Errorf("just thawed: %q", got)
	}
	if got := run(1); got == "" {
		t.Error("it never begins again")
	}
	must(t, os.Remove(reclaim))
	must(t, os.Mkdir(reclaim, 0o755))
	if err := a.giveBackOnce(k, &age); err == nil {
		t.Error("a kernel that takes nothing back")
	}
}

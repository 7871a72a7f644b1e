package hold

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/confine"
)

// TestExecRoundTripAgainstPlain prints how long a command takes from Exec to
// its result, beside a plain fork, setns and exec of the same binary.
func TestExecRoundTripAgainstPlain(t *testing.T) {
	if testing.Short() {
		t.Skip("measures, -short is set")
	}
	b := newBed(t)
	x := b.box()
	list, err := b.c.List(ctx(t))
	must(t, err)
	init := fmt.Sprint(list[0].PID)
	var ours, plain, start []time.Duration
	for range 200 {
		begin := time.Now()
		p, err := b.c.Exec(context.Background(), x.spec("/bin/true"))
		must(t, err)
		start = append(start, time.Since(begin))
		if _, err := p.Wait(context.Background()); err != nil {
			t.Fatal(err)
		}
		ours = append(ours, time.Since(begin))
		must(t, p.Release(context.Background()))
	}
	for range 50 {
		begin := time.Now()
		must(t, exec.Command("nsenter", "-t", init, "-U", "-m", "-p", "-i", "-u", "-n", "-C", "/bin/true").Run())
		plain = append(plain, time.Since(begin))
	}
	if o := os.Getenv("PLAIN"); o != "" {
		for range 3 {
			out, _ := exec.Command(o, init).CombinedOutput()
			t.Logf("%s", out)
		}
	}
	t.Logf("exec p50 %v, started %v, nsenter %v", p50(ours), p50(start), p50(plain))
}

// p50 is the median; p10 beside it is less moved by what else the machine does.
func p50(d []time.Duration) string {
	slices.Sort(d)
	return fmt.Sprintf("%v (p10 %v)", d[len(d)/2], d[len(d)/10])
}

// TestShellsAndRootsAreQuick prints how long Spawn and Enter take.
func TestShellsAndRootsAreQuick(t *testing.T) {
	if testing.Short() {
		t.Skip("measures, -short is set")
	}
	b := newBed(t)
	var spawn, enter, remove []time.Duration
	for i := range 60 {
		group := filepath.Join(b.group, fmt.Sprint("q", i))
		must(t, os.Mkdir(group, 0o755))
		r := root(t, testBase)
		id := fmt.Sprint("q", i)
		begin := time.Now()
		sh, err := b.c.Spawn(ctx(t), SpawnSpec{ID: id, UIDBase: testBase, GIDBase: testBase, Count: testCount, Cgroup: group, Lo: true,
			Masks: []string{"/proc/kcore", "/proc/keys", "/proc/timer_list", "/proc/sysrq-trigger"}, ReadOnly: []string{"/proc/sys", "/proc/bus", "/proc/fs", "/proc/irq"}})
		must(t, err)
		spawn = append(spawn, time.Since(begin))
		begin = time.Now()
		must(t, b.c.Enter(ctx(t), EnterSpec{ID: id, Root: r, Hostname: id}))
		enter = append(enter, time.Since(begin))
		_ = sh.UserNS.Close()
		_ = sh.NetNS.Close()
		begin = time.Now()
		must(t, b.c.RemoveSandbox(ctx(t), id))
		remove = append(remove, time.Since(begin))
		_ = unix.Rmdir(group)
	}
	t.Logf("p50: spawn %v, enter %v, remove %v", p50(spawn), p50(enter), p50(remove))
}

// TestNoticeCostsLittle prints what a listener costs a command, in turns with one that
// has none: its start, calls that are allowed, and a call that is refused.
func TestNoticeCostsLittle(t *testing.T) {
	if testing.Short() {
		t.Skip("measures, -short is set")
	}
	b := newBed(t)
	x := b.asker()
	plain, notice := filtersOf(t, confine.Build)
	spec := func(heard bool, argv ...string) ExecSpec {
		s := x.spec(argv...)
		if s.Seccomp, s.Notice = plain, heard; heard {
			s.Seccomp = notice
		}
		return s
	}
	took := map[string][]time.Duration{}
	measure := func(n int, what string, argv ...string) {
		for i := range 2 * n {
			heard := i%2 == 1
			begin := time.Now()
			if r, _, errs := x.run(spec(heard, argv...)); r.ExitCode != 0 {
				t.Fatalf("%s: %+v %s", what, r, errs)
			}
			key := fmt.Sprint(what, ", listener ", heard)
			took[key] = append(took[key], time.Since(begin))
		}
		for _, heard := range []bool{false, true} {
			key := fmt.Sprint(what, ", listener ", heard)
			t.Logf("%s: %s", key, p50(took[key]))
		}
	}
	measure(200, "true", "/bin/true")
	measure(10, "200,000 reads and writes", "dd", "if=/dev/zero", "of=/dev/null", "bs=1", "count=100000")
	measure(3, "40 refused calls", refusedAt, "repeat=40", fmt.Sprintf("%d:0", unix.SYS_MOUNT))
	_ = b.refusals()
}

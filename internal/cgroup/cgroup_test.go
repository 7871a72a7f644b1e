package cgroup

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
)

// testRoot makes a Root that the test removes, and checks that it is gone.
func testRoot(t testing.TB) *Root {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("control groups can be made by root only; uid is", os.Getuid())
	}
	r, err := Open("dsectest-" + dsec.Random(8))
	if err != nil {
		t.Fatal(err)
	}
	paths := []string{r.unified.path}
	for _, d := range r.v1 {
		paths = append(paths, d.path)
	}
	t.Cleanup(func() {
		if err := r.RemoveAll(testContext(t)); err != nil {
			t.Error(err)
		}
		for _, p := range paths {
			if _, err := os.Stat(p); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("%s is left: %v", p, err)
			}
		}
	})
	return r
}

func testContext(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 20*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func must[T any](v T, err error) func(testing.TB) T {
	return func(t testing.TB) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

// start runs a shell script in a member: born in its v2 group, and writing
// itself into the v1 groups before anything else.
func start(t testing.TB, m Member, script string) *exec.Cmd {
	t.Helper()
	h := must(m.Handles())(t)
	defer h.Close()
	enter := ""
	for i := range h.Tasks {
		enter += fmt.Sprintf("echo 0 >&%d; exec %d>&-; ", 3+i, 3+i)
	}
	cmd := exec.Command("/bin/sh", "-c", enter+script)
	cmd.ExtraFiles = h.Tasks
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(h.Unified.Fd())}
	out := &strings.Builder{}
	cmd.Stdout, cmd.Stderr = out, out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	return cmd
}

func output(t testing.TB, m Member, script string) (string, error) {
	cmd := start(t, m, script)
	err := cmd.Wait()
	return strings.TrimSpace(cmd.Stdout.(*strings.Builder).String()), err
}

// eventually polls what the kernel gives no event for.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("never happened:", what)
		}
	}
}

func TestCreateListRemoveLeavesNothing(t *testing.T) {
	r := testRoot(t)
	g := must(r.Create("a1", Limits{CPU: 0.5, Weight: 50, Visible: 1, Memory: 64 << 20, Pids: 20, Devices: DefaultDevices()}))(t)
	if _, err := r.Create("a1", Limits{}); !errors.Is(err, dsec.AlreadyExists.Err()) {
		t.Errorf("second Create: %v, want already_exists", err)
	}
	must(r.Service("hold"))(t)
	must(r.Service("hold"))(t)
	if names := must(r.List())(t); !slices.Equal(names, []string{"a1"}) {
		t.Errorf("List is %v, want only a1", names)
	}
	must(g.Child("x1"))(t)
	must(g.Child("x1"))(t)
	sleeper := start(t, g, "sleep 100")
	if err := g.Remove(testContext(t)); err != nil {
		t.Fatal(err)
	}
	if err := sleeper.Wait(); err == nil {
		t.Error("the process inside survived Remove")
	}
	if err := r.Remove(testContext(t), "a1"); err != nil {
		t.Errorf("second Remove: %v", err)
	}
	if names := must(r.List())(t); len(names) != 0 {
		t.Errorf("List is %v after Remove", names)
	}
}

func TestInvalidNamesAndLimitsAreRefused(t *testing.T) {
	r := testRoot(t)
	for _, n := range []string{"", "..", ".x", "a/b", "_hold", "a-b", strings.Repeat("a", 65)} {
		if _, err := r.Create(n, Limits{}); !errors.Is(err, dsec.Invalid.Err()) {
			t.Errorf("Create(%q): %v, want invalid", n, err)
		}
		if err := r.Remove(t.Context(), n); !errors.Is(err, dsec.Invalid.Err()) {
			t.Errorf("Remove(%q): %v, want invalid", n, err)
		}
	}
	if _, err := r.Create("a", Limits{Memory: -1}); !errors.Is(err, dsec.Invalid.Err()) {
		t.Errorf("negative memory: %v, want invalid", err)
	}
	if _, err := r.Group("nosuch"); !errors.Is(err, dsec.NotFound.Err()) {
		t.Errorf("Group of an unknown name: %v, want not_found", err)
	}
}

func TestAnotherProcessFindsRootGroupAndLimits(t *testing.T) {
	r := testRoot(t)
	want := Limits{CPU: 0.5, Weight: 50, Visible: 1, Memory: 64 << 20, Pids: 20, Devices: DefaultDevices()}
	g := must(r.Create("a", want))(t)
	if r.layout.version == Hybrid { // as if this process were started elsewhere
		other := must(Open(r.name))(t)
		defer func() { _ = other.Close() }()
		if other.v1["memory"].path != r.v1["memory"].path {
			t.Errorf("memory groups in %s, want %s", other.v1["memory"].path, r.v1["memory"].path)
		}
	}
	r2 := must(Open(r.name))(t)
	defer func() { _ = r2.Close() }()
	g2 := must(r2.Group("a"))(t)
	if got := g2.Limits(); got.Memory != want.Memory || got.CPU != want.CPU || len(got.Devices) != len(want.Devices) {
		t.Errorf("limits are %+v, want %+v", got, want)
	}
	if !slices.Equal(g2.CPUs(), g.CPUs()) {
		t.Errorf("CPUs are %v, want %v", g2.CPUs(), g.CPUs())
	}
	st := must(g2.Stats())(t)
	if st.MemoryLimit != want.Memory || st.PidsLimit != want.Pids {
		t.Errorf("the kernel says %+v, want %+v", st, want)
	}
}

// The visible CPU count is what programs size their pools by.
func TestA23_NprocAndOOM(t *testing.T) {
	r := testRoot(t)
	g := must(r.Create("a", Limits{CPU: 1, Visible: 1, Memory: 64 << 20, Pids: 200}))(t)
	if n, err := output(t, g, "nproc"); n != "1" || err != nil {
		t.Errorf("nproc prints %q, %v, want 1", n, err)
	}
	_, err := output(t, g, "tail /dev/zero")
	ee, ok := errors.AsType[*exec.ExitError](err)
	if !ok || ee.Sys().(syscall.WaitStatus).Signal() != unix.SIGKILL && ee.ExitCode() != 137 {
		t.Errorf("the hog ended with %v, want SIGKILL", err)
	}
	st := must(g.Stats())(t)
	if st.OOMKills < 1 || st.MemoryPeak < 60<<20 || st.MemoryPeak > 64<<20 {
		t.Errorf("oom kills %d, peak %d, want at least 1 and about 64 MiB", st.OOMKills, st.MemoryPeak)
	}
	if out, err := output(t, g, "echo alive"); out != "alive" || err != nil {
		t.Errorf("after the kill: %q, %v", out, err)
	}
}

func TestPidsLimitRefusesAndCounts(t *testing.T) {
	r := testRoot(t)
	g := must(r.Create("a", Limits{Pids: 5}))(t)
	if out, err := output(t, g, "for i in 1 2 3 4 5 6 7; do sleep 5 & done; wait"); err == nil {
		t.Errorf("8 processes under a limit of 5: %s", out)
	}
	if err := g.Kill(); err != nil {
		t.Fatal(err)
	}
	if st := must(g.Stats())(t); st.PidsDenied < 1 || st.PidsLimit != 5 {
		t.Errorf("denied %d, limit %d, want at least 1 and 5", st.PidsDenied, st.PidsLimit)
	}
}

func TestCPUQuotaThrottles(t *testing.T) {
	r := testRoot(t)
	g := must(r.Create("a", Limits{CPU: 0.1}))(t)
	spin := start(t, g, "while :; do :; done")
	eventually(t, "throttling", func() bool { s, err := g.Stats(); return err == nil && s.Throttled > 100*time.Millisecond })
	st := must(g.Stats())(t)
	if st.CPU <= 0 || st.Throttled < st.CPU {
		t.Errorf("cpu %v throttled %v with a tenth of a core", st.CPU, st.Throttled)
	}
	if err := g.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = spin.Wait()
}

func TestKillEndsSetsidChildrenOfOneCommandOnly(t *testing.T) {
	r := testRoot(t)
	g := must(r.Create("a", Limits{Memory: 64 << 20}))(t)
	c1, c2 := must(g.Child("x1"))(t), must(g.Child("x2"))(t)
	a := start(t, c1, "trap '' TERM; setsid sleep 100 & sleep 100; :")
	b := start(t, c2, "sleep 100")
	eventually(t, "two processes", func() bool { s, _ := c1.root.threads(c1.path); return len(s) >= 3 })
	if err := c1.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = a.Wait()
	if err := c1.WaitEmpty(testContext(t)); err != nil {
		t.Fatal(err)
	}
	if p := must(c2.Populated())(t); !p {
		t.Error("the other command was killed too")
	}
	if err := c1.Remove(testContext(t)); err != nil {
		t.Fatal(err)
	}
	if err := c1.Remove(testContext(t)); err != nil {
		t.Errorf("second Remove: %v", err)
	}
	if names := must(g.Children())(t); !slices.Equal(names, []string{"x2"}) {
		t.Errorf("children are %v, want x2", names)
	}
	if err := g.Remove(testContext(t)); err != nil {
		t.Fatal(err)
	}
	_ = b.Wait()
}

func TestFreezeStopsThawContinuesKillWorksFrozen(t *testing.T) {
	r := testRoot(t)
	g := must(r.Create("a", Limits{}))(t)
	c := must(g.Child("x"))(t)
	p := start(t, c, "while :; do :; done")
	eventually(t, "it runs", func() bool { d, _ := c.CPUTime(); return d > 10*time.Millisecond })
	if err := g.Freeze(testContext(t)); err != nil {
		t.Fatal(err)
	}
	if f := must(g.Frozen())(t); !f {
		t.Error("not frozen")
	}
	before := must(c.CPUTime())(t)
	time.Sleep(50 * time.Millisecond) // a span in which a running process would use time
	if after := must(c.CPUTime())(t); after != before {
		t.Errorf("a frozen process used %v", after-before)
	}
	if err := g.Thaw(testContext(t)); err != nil {
		t.Fatal(err)
	}
	eventually(t, "it runs again", func() bool { d, _ := c.CPUTime(); return d > before })
	if err := g.Freeze(testContext(t)); err != nil {
		t.Fatal(err)
	}
	if err := g.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = p.Wait()
}

func TestUpdateChangesALivingGroup(t *testing.T) {
	r := testRoot(t)
	g := must(r.Create("a", Limits{CPU: 1, Visible: 1, Memory: 64 << 20, Pids: 10, Devices: DefaultDevices()}))(t)
	c := must(g.Child("x"))(t)
	p := start(t, c, "sleep 100 & sleep 100; :")
	eventually(t, "it runs", func() bool { s, _ := r.threads("a"); return len(s) == 3 })
	for _, l := range []Limits{
		{CPU: 2, Visible: 2, Memory: 256 << 20, Pids: 100},
		{CPU: 0.5, Visible: 1, Memory: 32 << 20, Pids: 5, Weight: 200},
		{},
	} {
		if err := g.Update(testContext(t), l); err != nil {
			t.Fatal(err)
		}
		st := must(g.Stats())(t)
		if st.MemoryLimit != l.Memory || st.PidsLimit != l.Pids {
			t.Errorf("the kernel says %+v, want %+v", st, l)
		}
		threads := must(r.threads("a"))(t)
		want := len(r.cpus.all)
		if l.Visible > 0 {
			want = min(l.Visible, want)
		}
		var set unix.CPUSet
		for _, tid := range threads {
			var n int
			_, _ = fmt.Sscan(tid, &n)
			if err := unix.SchedGetaffinity(n, &set); err != nil || set.Count() != want {
				t.Errorf("thread %s sees %d CPUs (%v), want %d", tid, set.Count(), err, want)
			}
		}
		if n, err := output(t, g, "nproc"); n != fmt.Sprint(want) {
			t.Errorf("nproc prints %q, %v, want %d", n, err, want)
		}
	}
	if err := g.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = p.Wait()
}

func TestDeviceWallHoldsAgainstNodesMadeElsewhere(t *testing.T) {
	r := testRoot(t)
	dir := t.TempDir()
	for _, n := range []struct {
		name string
		mode uint32
		dev  uint64
	}{{"null", unix.S_IFCHR, unix.Mkdev(1, 3)}, {"mem", unix.S_IFCHR, unix.Mkdev(1, 1)}, {"disk", unix.S_IFBLK, unix.Mkdev(7, 250)}} {
		if err := unix.Mknod(filepath.Join(dir, n.name), n.mode|0o666, int(n.dev)); err != nil {
			t.Fatal(err)
		}
	}
	g := must(r.Create("a", Limits{Devices: DefaultDevices()}))(t)
	checkWall(t, g, dir)
}

func checkWall(t *testing.T, m Member, dir string) {
	t.Helper()
	if out, err := output(t, m, "echo x > "+dir+"/null && head -c 1 /dev/zero >/dev/null"); err != nil {
		t.Errorf("allowed devices: %v %s", err, out)
	}
	for _, cmd := range []string{"head -c 1 " + dir + "/mem", "head -c 1 " + dir + "/disk", "mknod " + dir + "/n c 1 3"} {
		out, err := output(t, m, cmd)
		if err == nil || !strings.Contains(out, "not permitted") {
			t.Errorf("%s: %v %q, want EPERM", cmd, err, out)
		}
	}
}

func TestDeviceProgramHoldsByItself(t *testing.T) {
	r := testRoot(t)
	dir := t.TempDir()
	for name, minor := range map[string]uint32{"null": 3, "mem": 1} {
		if err := unix.Mknod(filepath.Join(dir, name), unix.S_IFCHR|0o666, int(unix.Mkdev(1, minor))); err != nil {
			t.Fatal(err)
		}
	}
	if err := unix.Mknod(filepath.Join(dir, "disk"), unix.S_IFBLK|0o666, int(unix.Mkdev(7, 250))); err != nil {
		t.Fatal(err)
	}
	g := must(r.Create("a", Limits{}))(t)
	if err := r.attachWall("a", append(DefaultDevices(), Device{Major: 10, Minor: 229, Access: "rw"})); err != nil {
		t.Fatal(err)
	}
	checkWall(t, g, dir)
}

func TestHalfMadeGroupsAreListedAndRemoved(t *testing.T) {
	r := testRoot(t)
	if err := r.unified.mkdir("half"); err != nil {
		t.Fatal(err)
	}
	want := []string{"half"}
	if r.layout.version == Hybrid {
		if err := r.v1["memory"].mkdir("other"); err != nil {
			t.Fatal(err)
		}
		want = append(want, "other")
		stray := exec.Command("sleep", "100")
		if err := stray.Start(); err != nil {
			t.Fatal(err)
		}
		if err := r.v1["memory"].write("other/cgroup.procs", fmt.Sprint(stray.Process.Pid)); err != nil {
			t.Fatal(err)
		}
		go func() { _ = stray.Wait() }()
	}
	if names := must(r.List())(t); !slices.Equal(names, want) {
		t.Errorf("List is %v, want %v", names, want)
	}
	for _, n := range want {
		if err := r.Remove(testContext(t), n); err != nil {
			t.Error(err)
		}
	}
}

func TestG8_ManyCreatesAndRemovesLeaveNothing(t *testing.T) {
	r := testRoot(t)
	const workers, each = 8, 25
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			for i := range each {
				g, err := r.Create(fmt.Sprintf("g%d.%d", w, i), Limits{CPU: 1, Visible: 1, Memory: 64 << 20, Pids: 50, Devices: DefaultDevices()})
				if err == nil {
					err = g.Remove(testContext(t))
				}
				if err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	if names := must(r.List())(t); len(names) != 0 {
		t.Errorf("left: %v", names)
	}
	for c, load := range r.cpus.load {
		if load > 1e-9 || load < -1e-9 {
			t.Errorf("CPU %d still counts %g", c, load)
		}
	}
}

func BenchmarkCreateRemove(b *testing.B) {
	r := testRoot(b)
	ctx := testContext(b)
	var created time.Duration
	for b.Loop() {
		start := time.Now()
		g, err := r.Create("a", Limits{CPU: 1, Weight: 50, Visible: 1, Memory: 64 << 20, Pids: 50, Devices: DefaultDevices()})
		created += time.Since(start)
		if err != nil {
			b.Fatal(err)
		}
		if err := g.Remove(ctx); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(created.Microseconds())/float64(b.N), "create-µs/op")
}

// TestBuffersOfSocketsAreLimited: what lies unread in UDP sockets is memory of
// the group that has them.
func TestBuffersOfSocketsAreLimited(t *testing.T) {
	if _, err := exec.LookPath("python3"); err != nil {
		t.Skip("python3 is not installed:", err)
	}
	r := testRoot(t)
	g := must(r.Create("sockets", Limits{Memory: 64 << 20}))(t)
	const script = `exec python3 -c '
import socket
keep, sent = [], 0
for i in range(800):
    r = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    r.bind(("127.0.0.1", 0))
    keep.append(r)
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    for k in range(20):
        s.sendto(bytes(60000), r.getsockname())
    s.close()
total = 0
for r in keep:
    r.setblocking(False)
    try:
        while True: total += len(r.recv(65536))
    except BlockingIOError: pass
print(total)'`
	out, err := output(t, g, script)
	if err != nil {
		t.Logf("ended by the limit: %v %s", err, out) // v2 counts buffers with the rest
		return
	}
	held, err := strconv.Atoi(strings.TrimSpace(out))
	if err != nil || held == 0 || held > 64<<20 {
		t.Errorf("%d bytes lay in the sockets of a group of 64 MiB, %v", held, err)
	}
}

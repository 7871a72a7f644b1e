package hold

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	goruntime "runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/confine"
	"github.com/opendsec/dsec/internal/linux"
	"github.com/opendsec/dsec/process"
)

const refusedAt = "/opt/bin/refused"

func audited(t *testing.T) (arch uint32) {
	t.Helper()
	if goruntime.GOARCH == "arm64" {
		return unix.AUDIT_ARCH_AARCH64
	}
	return unix.AUDIT_ARCH_X86_64
}

// filtersOf are the plain and the noticing program of a profile.
func filtersOf(t *testing.T, p confine.Profile) (plain, notice []byte) {
	t.Helper()
	plain, err := confine.Program(p, confine.Arch(goruntime.GOARCH))
	must(t, err)
	notice, err = confine.Noticing(p, confine.Arch(goruntime.GOARCH))
	must(t, err)
	return plain, notice
}

// asker is a sandbox with the program that makes refused calls.
func (b *bed) asker() *box {
	t := b.t
	t.Helper()
	x, _ := b.spawn(nil)
	f, err := os.Open(program(t, "refused"))
	must(t, err)
	src, err := linux.Clone(f, false)
	must(t, err)
	must(t, f.Close())
	must(t, b.c.Enter(ctx(t), EnterSpec{ID: x.id, Root: root(t, testBase), Mounts: []Mount{{Source: src, Target: refusedAt, Exec: true, RO: true}}}))
	must(t, src.Close())
	return x
}

func (x *box) asks(notice []byte, calls ...string) ExecSpec {
	s := x.spec(append([]string{refusedAt}, calls...)...)
	s.Seccomp, s.Notice = notice, true
	return s
}

// refusals takes all there are, and says that they are written down.
func (b *bed) refusals() (all []Refusal) {
	b.t.Helper()
	var n uint64
	for {
		list, number, err := b.c.Refusals(ctx(b.t), n)
		must(b.t, err)
		if len(list) == 0 {
			return all
		}
		all, n = append(all, list...), number
	}
}

// markedCalls are all that the filter tells of: with no arguments, and with those that
// a clause looks for.
func markedCalls(t *testing.T, notice []byte) (calls []string) {
	t.Helper()
	add := func(nr uint32, args ...uint64) {
		var a [6]uint64
		copy(a[:], args)
		if _, err := confine.Judge(notice, audited(t), nr, a); err == nil {
			calls = append(calls, fmt.Sprintf("%d:%d,%d,%d", nr, a[0], a[1], a[2]))
		}
	}
	for nr := range uint32(480) {
		add(nr)
	}
	for _, flag := range []uint64{unix.CLONE_NEWUSER, unix.CLONE_NEWNS, unix.CLONE_NEWNET, unix.CLONE_NEWPID} {
		add(unix.SYS_UNSHARE, flag)
		add(unix.SYS_CLONE, flag|uint64(unix.SIGCHLD))
	}
	for _, family := range []uint64{unix.AF_PACKET, unix.AF_VSOCK, unix.AF_ALG, 2} {
		add(unix.SYS_SOCKET, family, unix.SOCK_RAW)
	}
	for _, request := range []uint64{unix.TIOCSTI, 0x541c, unix.TIOCCONS, unix.TIOCSETD, 0x40086602, 0xc028660f, 0xc0c0586d} {
		add(unix.SYS_IOCTL, 0, request)
	}
	add(unix.SYS_PERSONALITY, 0x0400000)
	if len(calls) < 40 {
		t.Fatalf("only %d calls are of interest: %v", len(calls), calls)
	}
	return calls
}

// Every marked call has the errno of the plain filter, whoever answers it, and a record
// with program, user and count.
func TestRefusalsAreAnsweredAsTheFilterDoesAndKept(t *testing.T) {
	b := newBed(t)
	x := b.asker()
	plain, notice := filtersOf(t, confine.Build)
	calls := append([]string{"repeat=3"}, markedCalls(t, notice)...)
	s := x.asks(notice, calls...)
	s.Seccomp, s.Notice = plain, false
	_, want, _ := x.run(s)
	s = x.asks(notice, calls...)
	s.Notice = false // no listener is asked for: the filter answers itself
	_, unheard, _ := x.run(s)
	if all := b.refusals(); len(all) > 0 {
		t.Errorf("nobody listened, and this was told: %+v", all)
	}
	s = x.asks(notice, calls...)
	s.NoNewPrivs, s.UID, s.GID = true, 1000, 1000
	_, got, errs := x.run(s)
	if got != want || unheard != want || strings.Count(want, "\n") != len(calls)-1 {
		t.Fatalf("with a listener:\n%s\nwithout:\n%s\nthe plain filter:\n%s\n%s", got, unheard, want, errs)
	}
	all := b.refusals()
	for _, line := range strings.Split(strings.TrimSpace(want), "\n") {
		f := strings.Fields(line)
		i := slices.IndexFunc(all, func(r Refusal) bool {
			return fmt.Sprint(r.Call) == f[0] && fmt.Sprintf("%d,%d,%d", r.Args[0], r.Args[1], r.Args[2]) == f[1]
		})
		if i < 0 {
			t.Errorf("not told: %s", line)
			continue
		}
		if r := all[i]; fmt.Sprint(r.Errno) != f[2] || r.Count != 3 || r.Exe != refusedAt || r.UID != 1000 || r.GID != 1000 || r.PID < 2 || r.Exec != s.Spec.ID ||
			r.Sandbox != x.id || r.Last.Before(r.First) {
			t.Errorf("%s is told as %+v", line, r)
		}
	}
	if len(all) != len(calls)-1 {
		t.Errorf("%d kinds are told, want %d", len(all), len(calls)-1)
	}
}

// A command with a terminal has two descriptors to send.
func TestACommandWithATerminalIsHeard(t *testing.T) {
	b := newBed(t)
	x := b.asker()
	_, notice := filtersOf(t, confine.Build)
	s := x.asks(notice, fmt.Sprintf("%d:0", unix.SYS_MOUNT))
	s.Spec.PTY = &process.Size{Rows: 24, Cols: 80}
	if _, out, _ := x.run(s); !strings.Contains(out, " 1\r\n") {
		t.Errorf("%q", out)
	}
	if all := b.refusals(); len(all) != 1 || all[0].Count != 1 {
		t.Errorf("%+v", all)
	}
}

// Refusals of a background process are told after its command, and an agent that comes
// back gets what was not written down.
func TestRefusalsOutliveCommandAgentAndSandbox(t *testing.T) {
	b := newBed(t)
	x := b.asker()
	_, notice := filtersOf(t, confine.Build)
	s := x.spec("sh", "-c", fmt.Sprintf("setsid sh -c 'while ! test -e /tmp/go; do sleep 0.01; done; %s %d:0; echo >/tmp/went' >/dev/null 2>&1 &", refusedAt, unix.SYS_BPF))
	s.Seccomp, s.Notice = notice, true
	x.run(s)
	r, _, _ := x.run(x.sh("touch /tmp/go; while ! test -e /tmp/went; do sleep 0.01; done"))
	if r.ExitCode != 0 {
		t.Fatalf("%+v", r)
	}
	list, n, err := b.c.Refusals(ctx(t), 0)
	must(t, err)
	if len(list) != 1 || list[0].Call != unix.SYS_BPF || list[0].Exec != s.Spec.ID {
		t.Fatalf("%+v", list)
	}
	must(t, b.c.RemoveSandbox(ctx(t), x.id))
	b.ensure(b.o.Binary)
	select {
	case e := <-b.c.Events():
		if e.Type != Refused {
			t.Errorf("%+v", e)
		}
	case <-ctx(t).Done():
		t.Fatal("nobody said that there are refusals")
	}
	again, m, err := b.c.Refusals(ctx(t), 0)
	must(t, err)
	if len(again) != 1 || again[0] != list[0] || m != n {
		t.Errorf("%+v, was %+v", again, list)
	}
	if rest, _, err := b.c.Refusals(ctx(t), m); len(rest) != 0 || err != nil {
		t.Errorf("%+v %v", rest, err)
	}
}

// An upgrade in the middle loses neither the listener nor what it was told.
func TestUpgradeKeepsListeners(t *testing.T) {
	b := newBed(t)
	x := b.asker()
	_, notice := filtersOf(t, confine.Build)
	mount, bpf := fmt.Sprintf("%d:0", unix.SYS_MOUNT), fmt.Sprintf("%d:0", unix.SYS_BPF)
	s := x.asks(notice, mount, "wait", mount, bpf)
	s.Spec.Stdin = true
	p := x.start(s)
	poll(t, "a refusal", func() bool { l, _, err := b.c.Refusals(ctx(t), 0); must(t, err); return len(l) > 0 })
	flood := x.start(x.asks(notice, "for=1500", mount))
	b.upgrade(markPlain)
	p, flood = b.find(x, p.Spec().ID), b.find(x, flood.Spec().ID)
	_, err := p.Write(ctx(t), []byte("go\n"))
	must(t, err)
	if _, out, _ := finishCommand(t, p); strings.Count(out, " 1\n") != 3 {
		t.Errorf("%q", out)
	}
	_, out, _ := finishCommand(t, flood)
	var made, mounts, bpfs, flooded int64
	if _, err := fmt.Sscanf(out, "made %d", &made); err != nil || !strings.HasSuffix(out, " 1\n") {
		t.Errorf("%q", out)
	}
	for _, r := range b.refusals() {
		switch {
		case r.Exec == flood.Spec().ID:
			flooded += r.Count
		case r.Call == unix.SYS_MOUNT:
			mounts += r.Count
		case r.Call == unix.SYS_BPF:
			bpfs += r.Count
		}
	}
	if mounts != 2 || bpfs != 1 || flooded != made || made < 10 {
		t.Errorf("%d and %d told, want 2 and 1; %d of %d of the flood", mounts, bpfs, flooded, made)
	}
}

// A hold that is stopped lets nothing through: who asks waits, and can be killed.
func TestAHoldThatIsStoppedLetsNothingThrough(t *testing.T) {
	b := newBed(t)
	x := b.asker()
	_, notice := filtersOf(t, confine.Build)
	s := x.asks(notice, "wait", fmt.Sprintf("%d:0", unix.SYS_UMOUNT2))
	s.Spec.Stdin = true
	p := x.start(s)
	info, err := b.c.List(ctx(t))
	must(t, err)
	pid := info[0].Execs[0].PID
	_, err = p.Write(ctx(t), nil)
	must(t, err)
	hold := b.c.Info().PID
	f, err := b.c.oneFile(ctx(t), opStdin, p.(*command).ref())
	must(t, err)
	must(t, unix.Kill(hold, unix.SIGSTOP))
	_, err = f.Write([]byte("go\n"))
	must(t, err)
	must(t, f.Close())
	poll(t, "the call to wait", func() bool {
		b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/syscall", pid))
		return strings.HasPrefix(string(b), fmt.Sprintf("%d ", unix.SYS_UMOUNT2)) || threadIn(pid, unix.SYS_UMOUNT2)
	})
	must(t, unix.Kill(hold, unix.SIGCONT))
	if _, out, _ := finishCommand(t, p); !strings.HasSuffix(out, " 1\n") {
		t.Errorf("%q", out)
	}
}

// threadIn reports whether some thread of a process is in a system call.
func threadIn(pid, nr int) bool {
	dir := fmt.Sprintf("/proc/%d/task", pid)
	list, _ := os.ReadDir(dir)
	return slices.ContainsFunc(list, func(e os.DirEntry) bool {
		b, _ := os.ReadFile(dir + "/" + e.Name() + "/syscall")
		return strings.HasPrefix(string(b), strconv.Itoa(nr)+" ")
	})
}

// If nobody has the listener any more, the kernel refuses: a filter with notice is
// closed without us.
func TestAFilterWithoutItsListenerRefuses(t *testing.T) {
	needRoot(t)
	_, notice := filtersOf(t, confine.Build)
	self, err := os.Executable()
	must(t, err)
	c := exec.Command(self)
	c.Env = append(os.Environ(), lonelyEnv+"=1")
	c.Stdin = strings.NewReader(string(notice))
	out, err := c.CombinedOutput()
	if err != nil || string(out) != fmt.Sprint(int(syscall.ENOSYS)) {
		t.Errorf("%q %v", out, err)
	}
}

// One that does nothing but ask is answered at most so often, and the hold spends
// at most a small part of a CPU on it.
func TestAFloodOfRefusedCallsIsBounded(t *testing.T) {
	b := newBed(t)
	x := b.asker()
	_, notice := filtersOf(t, confine.Build)
	var all []process.Process
	before, start := cpuOf(t, b.c.Info().PID), time.Now()
	for range 4 {
		all = append(all, x.start(x.asks(notice, "for=1000", fmt.Sprintf("%d:0", unix.SYS_MOUNT))))
	}
	var made int64
	for _, p := range all {
		_, out, _ := finishCommand(t, p)
		var n int64
		_, err := fmt.Sscanf(out, "made %d", &n)
		must(t, err)
		made += n
	}
	wall, spent := time.Since(start), cpuOf(t, b.c.Info().PID)-before
	t.Logf("%d calls in %v, %v of the hold's CPU", made, wall, spent)
	if most := int64(wall/paceSandbox) + paceAtOnce + 8; made > most {
		t.Errorf("%d calls were answered in %v, at most %d should", made, wall, most)
	}
	var told int64
	for _, r := range b.refusals() {
		told += r.Count
	}
	if told != made {
		t.Errorf("%d are told of %d", told, made)
	}
}

func cpuOf(t *testing.T, pid int) time.Duration {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/schedstat", pid))
	must(t, err)
	dir := fmt.Sprintf("/proc/%d/task", pid)
	list, err := os.ReadDir(dir)
	must(t, err)
	var sum time.Duration
	for _, e := range list {
		if b, err = os.ReadFile(dir + "/" + e.Name() + "/schedstat"); err == nil {
			n, _ := strconv.ParseInt(strings.Fields(string(b))[0], 10, 64)
			sum += time.Duration(n)
		}
	}
	return sum
}

// Background processes of many commands use up the listeners of their sandbox; commands
// beyond are refused the same, and are not told of.
func TestACommandWithoutAListenerIsRefusedTheSame(t *testing.T) {
	b := newBed(t)
	x := b.asker()
	_, notice := filtersOf(t, confine.Build)
	mount := fmt.Sprintf("%d:0", unix.SYS_MOUNT)
	for range mostListeners {
		s := x.spec("sh", "-c", "while test -e /tmp; do sleep 60; done >/dev/null 2>&1 &")
		s.Seccomp, s.Notice = notice, true
		x.run(s)
	}
	if _, out, _ := x.run(x.asks(notice, mount)); !strings.HasSuffix(out, " 1\n") || len(b.refusals()) > 0 {
		t.Errorf("%q, or it is told", out)
	}
	x.run(x.sh("kill -9 -1")) // and all of their listeners are closed
	poll(t, "room for a listener", func() bool {
		_, out, _ := x.run(x.asks(notice, mount))
		return strings.HasSuffix(out, " 1\n") && len(b.refusals()) == 1
	})
}

// Many kinds are one, and a sandbox uses up nobody else's room.
func TestKindsOfRefusalsAreBounded(t *testing.T) {
	x := newRefusals()
	for i := range 3 * kindsPerSandbox {
		x.add(Refusal{Sandbox: "a", Call: int64(i), Arg: -1, Count: 2})
	}
	x.add(Refusal{Sandbox: "b", Call: 1, Arg: 0, Args: [6]uint64{5}, Count: 1})
	x.add(Refusal{Sandbox: "b", Call: 1, Arg: 0, Args: [6]uint64{1<<32 + 5, 9}, Count: 1})
	x.add(Refusal{Sandbox: "b", Call: 1, Arg: 0, Args: [6]uint64{6}, Count: 1})
	batch := x.take(0)
	var other, b int64
	for _, r := range batch.List {
		if r.Sandbox == "a" && r.Call == otherKinds {
			other += r.Count
		}
		if r.Sandbox == "b" {
			b++
		}
	}
	if other != 4*kindsPerSandbox || b != 2 || len(batch.List) != kindsPerSandbox+1+2 {
		t.Errorf("%d others, %d of b, %d kinds", other, b, len(batch.List))
	}
}

const lonelyEnv = "HOLD_TEST_LONELY"

// beLonely installs the filter on stdin, closes its listener, mounts, and prints the errno.
func beLonely() {
	if os.Getenv(lonelyEnv) == "" {
		return
	}
	goruntime.LockOSThread()
	prog, _ := io.ReadAll(os.Stdin)
	f := unix.SockFprog{Len: uint16(len(prog) / 8), Filter: (*unix.SockFilter)(unsafe.Pointer(&prog[0]))}
	fd, _, e := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_NEW_LISTENER, uintptr(unsafe.Pointer(&f)))
	if e == 0 {
		_ = unix.Close(int(fd))
		_, _, e = unix.RawSyscall6(unix.SYS_MOUNT, 0, 0, 0, 0, 0, 0)
	}
	fmt.Print(int(e))
	os.Exit(0)
}

package proc

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/audit"
	"github.com/opendsec/dsec/internal/linux"
)

// roleEnv has this binary be a process of a sandbox.
const roleEnv = "DSEC_TEST_ROLE"

const busybox = "/bin/busybox"

func TestMain(m *testing.M) {
	role, count, _ := strings.Cut(os.Getenv(roleEnv), "-")
	n, _ := strconv.Atoi(count)
	switch role {
	case "":
		os.Exit(m.Run())
	case "short":
		startShort(n, "")
	case "long":
		startShort(n, strings.Repeat("x", mostArgs))
	case "nested":
		nested()
	case "hostile":
		hostile()
	}
}

// startShort starts programs that end at once, as fast as it can, by vfork, and prints their numbers.
func startShort(n int, more string) {
	for i := range n {
		c := exec.Command(busybox, "true", fmt.Sprint("n", i), more)
		if err := c.Run(); err != nil {
			panic(err)
		}
		fmt.Println(c.Process.Pid)
	}
}

func nested() {
	c := exec.Command(busybox, "true", "nested")
	c.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWUSER | syscall.CLONE_NEWPID}
	if err := c.Run(); err != nil {
		panic(err)
	}
}

// hostileArgs are arguments, and what of them is told.
var hostileArgs = []struct{ argv, want []string }{
	{nil, []string{""}}, // the kernel's own: since 5.18 there is always one
	{[]string{""}, []string{""}},
	{[]string{"a", "", "b", ""}, []string{"a", "", "b", ""}},
	{[]string{"\xff\xfe", "\x1b[31m\n"}, []string{"?", "\x1b[31m\n"}},
	{slices.Repeat([]string{strings.Repeat("y", 1<<17-1)}, 15), []string{strings.Repeat("y", mostArgs) + "…"}},
	{make([]string, 5000), append(make([]string, dsec.MaxAuditArgs), "…")},
	{[]string{strings.Repeat("z", mostArgs-1)}, []string{strings.Repeat("z", mostArgs-1)}},
	{[]string{strings.Repeat("z", mostArgs)}, []string{strings.Repeat("z", mostArgs) + "…"}},
	{[]string{strings.Repeat("z", mostArgs-1), "more"}, []string{strings.Repeat("z", mostArgs-1), "…"}},
	{[]string{"z" + strings.Repeat("é", mostArgs)}, []string{"z" + strings.Repeat("é", mostArgs/2-1) + "…"}},
}

// longPath is busybox, by a path that is not told whole.
var longPath = strings.Repeat("/.", mostAsked) + busybox

func hostile() {
	for i, h := range hostileArgs {
		path := busybox
		if i == 0 {
			path = longPath
		}
		pid, err := syscall.ForkExec(path, h.argv, &syscall.ProcAttr{})
		if err != nil {
			panic(fmt.Sprint(i, err))
		}
		if _, err := syscall.Wait4(pid, nil, 0, nil); err != nil {
			panic(err)
		}
	}
	fd, err := unix.Open(busybox, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		panic(err)
	}
	byFD(fd)
}

// byFD becomes the program of an open file.
func byFD(fd int) {
	path, _ := unix.BytePtrFromString("")
	arg, _ := unix.BytePtrFromString("true")
	argv := []*byte{arg, nil}
	_, _, errno := unix.Syscall6(unix.SYS_EXECVEAT, uintptr(fd), uintptr(unsafe.Pointer(path)), uintptr(unsafe.Pointer(&argv[0])), 0, unix.AT_EMPTY_PATH, 0)
	panic(errno)
}

// asRole has this binary be process 1 of a pid namespace, with a uid of the first range.
func asRole(t *testing.T, role string) []string {
	t.Helper()
	c := exec.Command("/proc/self/exe")
	c.Env = []string{roleEnv + "=" + role, "PATH=/bin"}
	c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: base + 5, Gid: base + 5}, Cloneflags: syscall.CLONE_NEWPID}
	var errs bytes.Buffer
	c.Stderr = &errs
	out, err := c.Output()
	if err != nil {
		t.Fatalf("%s: %v %s", role, err, errs.String())
	}
	return strings.Fields(string(out))
}

// needsTypes skips where the kernel does not describe itself.
func needsTypes(t *testing.T) {
	t.Helper()
	if err := hasTypes(); err != nil {
		t.Skip("the kernel's types were asked for: ", err)
	}
}

var hasTypes = sync.OnceValue(func() error {
	_, err := kernelOffsets()
	return err
})

// startedBy is what was told of what a role started, but for the role's own start, and what was lost.
// Nobody reads while it runs, if blind.
func startedBy(t *testing.T, role string, f form, blind bool) (got []dsec.AuditRecord, lost int64, pids []string) {
	t.Helper()
	k, o := linux.NewKeeper(), &told{}
	defer k.Close()
	id := newID()
	w := openAs(t, k, o, f)
	must(t, w.Add(t.Context(), audit.Subject{ID: id, UID: base}, false))
	if !blind {
		must(t, w.Start())
	}
	pids = asRole(t, role)
	if blind {
		must(t, w.Start())
	}
	w.Remove(t.Context(), id, nil)
	must(t, w.Close())
	must(t, Forget(t.Context(), w.cfg))
	for _, r := range o.of(id) {
		if r.Kind == dsec.AuditLost {
			lost += r.Count
		} else {
			got = append(got, r)
		}
	}
	if len(got) == 0 {
		t.Fatal("nothing is told")
	}
	return got[1:], lost, pids
}

const shortOnes = 500

// TestShortProgramsAreToldWhole: each has its arguments, its number, and its parent's.
func TestShortProgramsAreToldWhole(t *testing.T) {
	needsTypes(t)
	for name, f := range map[string]form{"by loads": byLoads, "by helper": byHelper} {
		t.Run(name, func(t *testing.T) { shortAreWhole(t, f) })
	}
}

func shortAreWhole(t *testing.T, f form) {
	got, lost, pids := startedBy(t, fmt.Sprint("short-", shortOnes), f, false)
	if len(got) != shortOnes || lost != 0 || len(pids) != shortOnes {
		t.Fatalf("%d of %d are told, %d lost", len(got), len(pids), lost)
	}
	unnamed := 0
	for i, r := range got {
		if want := []string{busybox, "true", fmt.Sprint("n", i), ""}; !slices.Equal(r.Args, want) || strconv.Itoa(r.PID) != pids[i] || r.PPID != 1 || r.UID != 5 {
			t.Fatalf("%d: %+v, number %s", i, r, pids[i])
		}
		if strings.HasPrefix(r.Exe, "~") {
			unnamed++
		}
		if !ended(r, busybox, "busybox") && !strings.HasSuffix(r.Exe, "/busybox") {
			t.Fatalf("%d: %+v", i, r)
		}
	}
	t.Logf("%d of %d without their file", unnamed, len(got))
}

// TestWithoutTypesProcIsAsked: as many are told, and of those that still were there all of it.
func TestWithoutTypesProcIsAsked(t *testing.T) {
	got, lost, pids := startedBy(t, fmt.Sprint("short-", shortOnes), byProc, false)
	if len(got) != shortOnes || lost != 0 {
		t.Fatalf("%d are told, %d lost", len(got), lost)
	}
	whole := 0
	for i, r := range got {
		if r.Exe == "~busybox" {
			if r.Args != nil {
				t.Fatalf("%d: %+v", i, r)
			}
			continue
		}
		if len(r.Args) < 3 || r.Args[2] != fmt.Sprint("n", i) || r.PID != 0 && strconv.Itoa(r.PID) != pids[i] || r.PPID != 1 {
			t.Fatalf("%d: %+v, number %s", i, r, pids[i])
		}
		if r.PID != 0 { // it ended while it was asked about
			whole++
		}
	}
	t.Logf("%d of %d whole", whole, len(got))
}

// TestHostileArgumentsAreTold: all of them had ended before anybody read.
func TestHostileArgumentsAreTold(t *testing.T) {
	needsTypes(t)
	got, lost, _ := startedBy(t, "hostile", byLoads, true)
	if len(got) != len(hostileArgs)+1 || lost != 0 {
		t.Fatalf("%d are told, %d lost", len(got), lost)
	}
	for i, h := range hostileArgs {
		want := "~" + busybox
		if i == 0 {
			want = "~" + longPath[:mostAsked-1] + "…"
		}
		if r := got[i]; !reflect.DeepEqual(r.Args, h.want) || r.PPID != 1 || r.PID == 0 || r.Exe != want {
			t.Errorf("%d: %.300q", i, fmt.Sprintf("%+v", r))
		}
	}
	if r := got[len(got)-1]; r.PID != 1 || r.PPID != 0 || !slices.Equal(r.Args, []string{"true"}) || !strings.HasPrefix(r.Exe, "~") || strings.Contains(r.Exe, "/") {
		t.Errorf("by descriptor: %+v", r)
	}
}

// TestNestedNumbersAreOfEachOnesOwn: a container in the sandbox counts from 1 again.
func TestNestedNumbersAreOfEachOnesOwn(t *testing.T) {
	needsTypes(t)
	for _, f := range []form{byLoads, byHelper} {
		got, _, _ := startedBy(t, "nested", f, true)
		if len(got) != 1 || got[0].PID != 1 || got[0].PPID != 1 || len(got[0].Args) != 3 {
			t.Errorf("%d: %+v", f, got)
		}
	}
}

// TestLongArgumentsPushNothingOut: what is long is told while there is room for all that is short.
func TestLongArgumentsPushNothingOut(t *testing.T) {
	needsTypes(t)
	const n = richBytes/mostArgs + 200
	got, lost, _ := startedBy(t, fmt.Sprint("long-", n), byLoads, true)
	if len(got)+int(lost) != n {
		t.Fatalf("%d of %d told, %d lost", len(got), n, lost)
	}
	rich := 0
	for i, r := range got {
		if len(r.Args) > 0 {
			rich++
		}
		if r.PID == 0 || r.PPID != 1 || len(r.Args) == 0 && r.Exe != "~busybox" {
			t.Fatalf("%d: %.300q", i, fmt.Sprintf("%+v", r))
		}
	}
	if rich < richBytes/mostStarted || rich == len(got) {
		t.Errorf("%d of %d have arguments", rich, len(got))
	}
	t.Logf("%d of %d with arguments, %d lost", rich, len(got), lost)
}

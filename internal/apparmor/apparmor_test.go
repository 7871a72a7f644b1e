package apparmor

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/confine"
	"github.com/opendsec/dsec/confine/apparmor"
)

// childEnv makes the test binary take a profile and execute itself again, and
// then, under it, try what is to be refused.
const childEnv = "APPARMOR_TEST_PROFILE"

func TestMain(m *testing.M) {
	switch p := os.Getenv(childEnv); {
	case p == "":
		os.Exit(m.Run())
	case strings.HasPrefix(p, "under "):
		try(os.Args[1:])
	default:
		become(p)
	}
	os.Exit(0)
}

// become does what the forker does: the next program has the profile.
func become(profile string) {
	runtime.LockOSThread()
	err := os.WriteFile("/proc/thread-self/attr/apparmor/exec", []byte("exec "+profile), 0)
	if err == nil {
		err = os.Setenv(childEnv, "under "+profile)
	}
	if err == nil {
		err = unix.Exec("/proc/self/exe", os.Args, os.Environ())
	}
	fmt.Println("become", err)
	os.Exit(1)
}

// try prints "what errno" for each thing, 0 for what worked.
func try(args []string) {
	say := func(what string, err error) {
		var e unix.Errno
		errors.As(err, &e)
		fmt.Println(what, int(e))
	}
	current, _ := Current()
	fmt.Println("current", current)
	say("mount", unix.Mount("none", "/mnt", "tmpfs", 0, ""))
	say("umount", unix.Unmount("/mnt", 0))
	for what, s := range map[string][3]int{"tcp": {unix.AF_INET, unix.SOCK_STREAM, 0}, "raw": {unix.AF_INET, unix.SOCK_RAW, 253}, "packet": {unix.AF_PACKET, unix.SOCK_RAW, 0},
		"netlink": {unix.AF_NETLINK, unix.SOCK_RAW, 0}, "unix": {unix.AF_UNIX, unix.SOCK_STREAM, 0}} {
		_, err := unix.Socket(s[0], s[1], s[2])
		say(what, err)
	}
	_, err := os.ReadFile("/proc/sys/kernel/hostname")
	say("read-sysctl", err)
	say("write-sysctl", write("/proc/sys/kernel/hostname", "x"))
	say("write-sysrq", write("/proc/sysrq-trigger", ""))
	say("write-file", write("/tmp/written", "x"))
	say("capability", unix.Sethostname([]byte("x")))
	say("change", write("/proc/self/attr/apparmor/current", "changeprofile unconfined"))
	for _, a := range args {
		what, pid, _ := strings.Cut(a, "=")
		n, _ := strconv.Atoi(pid)
		say("signal-"+what, unix.Kill(n, 0))
		_, err := os.ReadFile("/proc/" + pid + "/environ")
		say("read-"+what, err)
		say("trace-"+what, syscall.PtraceAttach(n))
	}
	if len(args) == 0 { // somebody to try it on
		fmt.Println("waits")
		time.Sleep(time.Hour)
	}
}

func write(path, text string) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE, 0o644)
	if err != nil {
		return err
	}
	_, err = f.WriteString(text)
	return errors.Join(err, f.Close())
}

// open is the loader, or the reason why there is none here.
func open(t testing.TB) *Loader {
	t.Helper()
	l, err := Open()
	if err != nil {
		if !errors.Is(err, dsec.Unsupported.Err()) {
			t.Fatal(err)
		}
		t.Skip(err)
	}
	return l
}

func (l *Loader) load(t testing.TB, p confine.Profile, n int) string {
	t.Helper()
	name := apparmor.Name(p, n)
	text, err := apparmor.Text(apparmor.Options{Name: name, Profile: p, Userns: l.Userns()})
	if err == nil {
		err = l.Load(t.Context(), name, text)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Remove(name); err != nil {
			t.Error(err)
		}
	})
	return name
}

// sleeper is a process under a profile, "" for none, that waits to be killed.
func sleeper(t testing.TB, profile string) string {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), childEnv+"="+profile)
	if profile == "" {
		cmd.Env = append(os.Environ(), childEnv+"=under nothing")
	}
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	var seen strings.Builder
	b := make([]byte, 4096)
	for !strings.Contains(seen.String(), "waits") {
		n, err := out.Read(b)
		if seen.Write(b[:n]); err != nil {
			t.Fatalf("%s: %v", seen.String(), err)
		}
	}
	return strconv.Itoa(cmd.Process.Pid)
}

func tried(t testing.TB, profile string, on ...string) map[string]string {
	t.Helper()
	cmd := exec.Command("/proc/self/exe", on...)
	cmd.Env = append(os.Environ(), childEnv+"="+profile)
	if profile == "" {
		cmd.Env = append(os.Environ(), childEnv+"=under nothing")
	}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	got := map[string]string{}
	for line := range strings.Lines(string(out)) {
		what, v, _ := strings.Cut(strings.TrimSpace(line), " ")
		got[what] = v
	}
	return got
}

const (
	ok   = "0"
	perm = "1"
	acc  = "13"
)

// The wall holds alone: there is no filter of system calls, no namespace and no
// lack of capabilities here, and without a profile everything works.
func TestProfilesAreEnforcedWithoutAnyOtherWall(t *testing.T) {
	l := open(t)
	build, other, pwn := l.load(t, confine.Build, 1), l.load(t, confine.Build, 2), l.load(t, confine.Pwn, 3)
	names, err := l.Loaded("dsec-")
	if err != nil || !slices.Contains(names, build) || !slices.Contains(names, pwn) {
		t.Fatal(names, err)
	}
	peers := func(own string) []string {
		return []string{"own=" + sleeper(t, own), "other=" + sleeper(t, other), "machine=" + sleeper(t, "")}
	}
	for _, c := range []struct {
		profile string
		want    map[string]string
	}{
		{"", map[string]string{"current": "unconfined", "mount": ok, "umount": ok, "raw": ok, "packet": ok, "netlink": ok, "write-sysctl": ok, "write-sysrq": ok, "capability": ok,
			"signal-other": ok, "read-other": ok, "trace-other": ok}},
		{build, map[string]string{"current": build + " (enforce)", "mount": acc, "umount": perm, "tcp": ok, "unix": ok, "netlink": ok, "raw": acc, "packet": acc,
			"read-sysctl": ok, "write-sysctl": acc, "write-sysrq": acc, "write-file": ok, "capability": perm, "change": acc,
			"signal-own": ok, "read-own": ok, "trace-own": acc, "signal-other": acc, "read-other": acc, "trace-other": acc,
			"signal-machine": acc, "read-machine": acc, "trace-machine": acc}},
		{pwn, map[string]string{"current": pwn + " (enforce)", "mount": acc, "raw": ok, "packet": ok, "write-sysctl": acc, "capability": perm,
			"signal-own": ok, "trace-own": ok, "signal-other": acc, "trace-other": acc, "trace-machine": acc}},
	} {
		got := tried(t, c.profile, peers(c.profile)...)
		for what, want := range c.want {
			if got[what] != want {
				t.Errorf("%q: %s is %q, want %q", c.profile, what, got[what], want)
			}
		}
	}
}

func TestRemovedProfilesAreGoneAndMissingOnesAreRefused(t *testing.T) {
	l := open(t)
	name := l.load(t, confine.Desktop, 9)
	for range 2 {
		if err := l.Remove(name); err != nil {
			t.Fatal(err)
		}
	}
	if names, err := l.Loaded(name); err != nil || len(names) != 0 {
		t.Error(names, err)
	}
	cmd := exec.Command("/proc/self/exe", "x")
	cmd.Env = append(os.Environ(), childEnv+"="+name)
	if out, err := cmd.CombinedOutput(); err == nil || !strings.Contains(string(out), "become write /proc/thread-self/attr/apparmor/exec: no such file") {
		t.Errorf("a profile that is not loaded was taken: %v %s", err, out)
	}
}

func TestWithoutAppArmorTheReasonIsSaid(t *testing.T) {
	l, err := Open()
	if err == nil {
		t.Skipf("this kernel has AppArmor, at %s", l.dir)
	}
	if !errors.Is(err, dsec.Unsupported.Err()) || !strings.Contains(err.Error(), "AppArmor") {
		t.Error(err)
	}
	t.Log(err)
}

func BenchmarkLoad(b *testing.B) {
	l := open(b)
	text := func(n int) string {
		s, err := apparmor.Text(apparmor.Options{Name: apparmor.Name(confine.Build, n), Profile: confine.Build})
		if err != nil {
			b.Fatal(err)
		}
		return s
	}
	b.Run("first", func(b *testing.B) {
		for n := range b.N {
			clear(l.compiled)
			if err := l.Load(b.Context(), "x", text(n)); err != nil {
				b.Fatal(err)
			}
			if err := l.Remove(apparmor.Name(confine.Build, n)); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("again", func(b *testing.B) {
		for range b.N {
			if err := errors.Join(l.Load(b.Context(), "x", text(0)), l.Remove(apparmor.Name(confine.Build, 0))); err != nil {
				b.Fatal(err)
			}
		}
	})
}

package hold

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/opendsec/dsec/internal/linux"
)

const everyCap = 1<<41 - 1

// program builds a static program of testdata.
func program(t *testing.T, name string) string {
	t.Helper()
	bin := t.TempDir() + "/" + name
	build := exec.Command("go", "build", "-o", bin, "./testdata/"+name)
	build.Env = append(os.Environ(), "CGO_ENABLED=0") // nothing of the machine's is to be found inside
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return bin
}

// TestRootSwitchHoldsAgainstEveryCapability is why chroot over an empty
// read-only tmpfs is enough: whatever is tried, below the sandbox's root there
// is nothing, and nothing can be made of it.
func TestRootSwitchHoldsAgainstEveryCapability(t *testing.T) {
	needRoot(t)
	bin := program(t, "escape")
	b := newBed(t)
	for _, try := range []string{"chroot", "dotdot", "setns", "detach", "unshare", "move", "pivot"} {
		x, _ := b.spawn(nil)
		f, err := os.Open(bin)
		must(t, err)
		src, err := linux.Clone(f, false)
		must(t, err)
		must(t, f.Close())
		must(t, b.c.Enter(ctx(t), EnterSpec{ID: x.id, Root: root(t, testBase),
			Mounts: []Mount{{Source: src, Target: "/opt/bin/escape", Exec: true, RO: true}}}))
		must(t, src.Close())
		s := x.spec("/opt/bin/escape", try)
		s.Caps = Caps{Bounding: everyCap, Permitted: everyCap}
		r, out, errs := x.run(s)
		t.Logf("%s: %s", try, out)
		if r.ExitCode != 0 {
			t.Errorf("%s: %+v %q", try, r, errs)
			continue
		}
		inside := strings.Contains(out, "/ is [bin dev etc") || strings.Contains(out, "/ is [old]")
		nothing := strings.Contains(out, "/ is [dev empty proc sys]") && strings.Contains(out, "write: mkdir /escaped: read-only file system") &&
			strings.Contains(out, "remount: operation not permitted") && strings.Contains(out, "proc: operation not permitted")
		if !inside && !nothing {
			t.Errorf("%s reached something: %s", try, out)
		}
		if try == "detach" && !nothing { // the underside of the root was seen
			t.Errorf("%s did not reach the empty root: %s", try, out)
		}
	}
}

// TestInitIsOutOfReach: root inside, with the capabilities of a container's
// root and also with all of them, sees nothing of PID 1 and cannot touch it.
func TestInitIsOutOfReach(t *testing.T) {
	b := newBed(t)
	x := b.box()
	for _, caps := range []uint64{dockerCaps, everyCap} {
		s := x.sh(`for f in mem environ maps auxv stack root fd exe cwd ns/mnt ns/user pagemap; do
			if cat /proc/1/$f >/dev/null 2>&1 || ls /proc/1/$f/ >/dev/null 2>&1 || readlink /proc/1/$f; then echo reached $f; fi; done
			kill -9 1; kill -STOP 1; kill -SEGV 1; kill -TERM 1
			for f in /proc/[0-9]*; do [ $f = /proc/1 ] || cat $f/comm; done | sort -u; ls /proc/self/fd; cat /proc/1/cmdline | tr '\0' ' '`)
		s.Caps = Caps{Bounding: caps, Permitted: caps}
		r, out, errs := x.run(s)
		if r.ExitCode != 0 || strings.Contains(out, "reached") || !strings.HasPrefix(out, "cat\nsh\n") && !strings.HasPrefix(out, "sh\n") {
			t.Fatalf("%+v %q %q", r, out, errs)
		}
		if !strings.Contains(out, "0\n1\n2\n3\n") || strings.Contains(out, "\n4\n") { // 3 is ls's own
			t.Fatalf("descriptors: %q", out)
		}
	}
	list, err := b.c.List(ctx(t))
	must(t, err)
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", list[0].PID))
	if err != nil || len(fds) != 0 {
		t.Fatalf("PID 1 holds descriptors: %v %v", fds, err)
	}
	if r, out, _ := x.run(x.sh("echo alive")); out != "alive\n" {
		t.Fatalf("%+v", r)
	}
}

func TestMountsAndMasksAreInPlace(t *testing.T) {
	b := newBed(t)
	x, _ := b.spawn(func(s *SpawnSpec) {
		s.ShmSize = 1 << 20
		s.Sysctls = []Sysctl{{Path: "net/ipv4/ping_group_range", Value: "0 65535"}}
		s.Masks = []string{"/proc/kcore", "/proc/timer_list", "/proc/nothing", "/proc/acpi", "/proc/tty"}
		s.ReadOnly = []string{"/proc/sys", "/proc/bus", "/proc/nope"}
	})
	must(t, b.c.Enter(ctx(t), EnterSpec{ID: x.id, As: "other", Root: root(t, testBase), Hostname: "h",
		Mounts: []Mount{{Target: "/scratch/a", Size: 1 << 20, Mode: 0o750}}}))
	x.id = "other"
	r, out, errs := x.run(x.sh(`cat /proc/sys/net/ipv4/ping_group_range; cat /proc/timer_list | wc -c; ls -A /proc/tty | tr '\n' ' '; cat /sys/known
		stat -c '%a %U' /scratch/a; df -k /dev/shm | tail -1 | tr -s ' ' | cut -d' ' -f2
		echo 1 > /proc/sys/net/ipv4/ip_forward; mkdir /sys/x; touch /dev/shm/x /dev/mqueue/y && echo made
		ping -c1 -W1 127.0.0.1 >/dev/null && echo pong; umount /proc/timer_list; grep -c ' /proc' /proc/mounts`))
	want := "0\t65535\n0\nyes\n750 root\n1024\nmade\npong\n"
	if r.ExitCode != 0 || !strings.HasPrefix(out, want) || !strings.Contains(errs, "ip_forward: Read-only file system") ||
		!strings.Contains(errs, "'/sys/x': Read-only file system") || !strings.Contains(errs, "umount") {
		t.Fatalf("%+v\n%q\n%q\n%s", r, out, want, errs)
	}
}

func TestHostileRootIsRefused(t *testing.T) {
	b := newBed(t)
	for _, target := range []string{"/proc", "/sys", "/dev"} {
		x, _ := b.spawn(nil)
		m := root(t, testBase)
		must(t, os.Symlink("/etc", fmt.Sprintf("/proc/self/fd/%d%s", m.Fd(), target)))
		err := b.c.Enter(ctx(t), EnterSpec{ID: x.id, Root: m})
		wantClass(t, err, "invalid", target)
		must(t, b.c.RemoveSandbox(ctx(t), x.id))
		x, _ = b.spawn(nil)
		m = root(t, testBase)
		must(t, os.WriteFile(fmt.Sprintf("/proc/self/fd/%d%s", m.Fd(), target), nil, 0o644))
		err = b.c.Enter(ctx(t), EnterSpec{ID: x.id, Root: m})
		wantClass(t, err, "invalid", target)
		must(t, b.c.RemoveSandbox(ctx(t), x.id))
	}
}

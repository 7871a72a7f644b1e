package vm

import (
	"bytes"
	"context"
	"errors"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
)

// kernel fetches the kernel; without DSEC_VM the tests of this package are
// not run, because under emulation they take minutes.
func kernel(t *testing.T) *Kernel {
	t.Helper()
	if os.Getenv("DSEC_VM") == "" {
		t.Skip("a VM without KVM takes minutes: set DSEC_VM=1, or run scripts/test.sh vm")
	}
	if _, err := exec.LookPath("qemu-system-x86_64"); err != nil {
		t.Skip(err)
	}
	k, err := Fetch(t.Context(), cacheDir(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(k.Close)
	return k
}

func cacheDir(t *testing.T) string {
	dir, err := filepath.Abs("../../.cache/vm")
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

func run(t *testing.T, k *Kernel, limit time.Duration, j Job) Result {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	start := time.Now()
	r, err := k.Run(ctx, j)
	if err != nil {
		t.Fatalf("%v\n%s\n--- console\n%s", err, last(r.Output, 8000), last(r.Console, 3000))
	}
	t.Logf("booted, ran and stopped in %v", time.Since(start).Round(time.Millisecond))
	return r
}

// testBinary builds the tests of a package for the guest.
func testBinary(t *testing.T, pkg string) string {
	t.Helper()
	out := filepath.Join(t.TempDir(), filepath.Base(pkg)+".test")
	cmd := exec.Command("go", "test", "-c", "-ldflags", "-s -w", "-o", out, pkg)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH=amd64")
	if b, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build tests of %s: %v %s", pkg, err, b)
	}
	return out
}

var (
	passed  = regexp.MustCompile(`(?m)^\s*--- PASS: (\S+)`)
	skipped = regexp.MustCompile(`(?m)^\s*--- SKIP: (\S+)`)

	measured = regexp.MustCompile(`(?m)^Benchmark.*$`)
)

// guestTime bounds the tests of one package in the guest.
const guestTime = 8 * time.Minute

// inGuest runs the tests of a package in the guest and returns which passed.
func inGuest(t *testing.T, pkg, before string, j Job, flags ...string) map[string]bool {
	t.Helper()
	k := kernel(t)
	files := map[string]string{"/t.test": testBinary(t, pkg)}
	maps.Copy(files, j.Files)
	j.Files = files
	j.Script = before + "\ncd /tmp && /t.test -test.v -test.timeout " + guestTime.String() + " " + strings.Join(flags, " ") + "\n"
	r := run(t, k, guestTime+2*time.Minute, j)
	if err := os.WriteFile(filepath.Join(t.ArtifactDir(), "output"), []byte(r.Output), 0o644); err != nil {
		t.Error(err)
	}
	ok := map[string]bool{}
	for _, m := range passed.FindAllStringSubmatch(r.Output, -1) {
		ok[m[1]] = true
	}
	for _, m := range skipped.FindAllStringSubmatch(r.Output, -1) {
		t.Logf("skipped in the guest: %s", m[1])
	}
	for _, line := range measured.FindAllString(r.Output, -1) {
		t.Logf("measured in the guest: %s", strings.Join(strings.Fields(line), " "))
	}
	if r.Exit != 0 || len(ok) == 0 {
		t.Errorf("%s in the guest: status %d, %d tests passed\n%s\n--- console\n%s", pkg, r.Exit, len(ok), last(r.Output, 12000), last(r.Console, 2000))
	}
	return ok
}

func TestGuestIsLinux61WithPureCgroupV2(t *testing.T) {
	k := kernel(t)
	r := run(t, k, 3*time.Minute, Job{Script: "uname -r; cat /sys/fs/cgroup/cgroup.controllers; grep -c cgroup /proc/mounts; exit 7"})
	lines := strings.Split(r.Output, "\n")
	if r.Exit != 7 || len(lines) < 3 || lines[0] != k.Release || !strings.Contains(lines[1], "memory") || lines[2] != "1" {
		t.Errorf("status %d, output %q", r.Exit, r.Output)
	}
}

// The kernel and the initramfs of this machine's own Debian, made twice from
// nothing, are the same bytes, and those that the lock file names.
func TestTheSameIsBuiltTwice(t *testing.T) {
	k := kernel(t)
	var first [2][]byte
	for n := range 2 {
		start := time.Now()
		c := *k
		c.cache = t.TempDir()
		built, err := c.build(t.Context(), []string{"btrfs", "overlay", "erofs", "nft_fib_inet", "veth"})
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("made in %v: %s, pinned %v, modules %v", time.Since(start).Round(time.Millisecond), built.Release, built.Pinned, built.Modules)
		for i, name := range []string{built.Image, built.Initramfs} {
			b, err := os.ReadFile(name)
			if err != nil {
				t.Fatal(err)
			}
			if n == 0 {
				first[i] = b
			} else if !bytes.Equal(b, first[i]) {
				t.Errorf("%s: other bytes than the first time", filepath.Base(name))
			}
		}
		if !built.Pinned {
			t.Logf("the pinned kernel is gone from the mirror: pin %+v", built.Lock)
		}
	}
}

func TestHangingScriptEndsWithTheContext(t *testing.T) {
	k := kernel(t)
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	r, err := k.Run(ctx, Job{Script: "echo begun; sleep 10000"})
	if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(r.Output, "begun") {
		t.Errorf("%v, output %q", err, r.Output)
	}
}

package linux

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

func needRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("mounting needs root and this test runs without it")
	}
}

func TestNewMountNSHoldsOnlyAnEmptyTmpfs(t *testing.T) {
	needRoot(t)
	ns, err := NewMountNS()
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	proc, err := os.Open("/proc/self/status") // proves that descriptors still reach the outside
	if err != nil {
		t.Fatal(err)
	}
	defer proc.Close()
	err = OnThread(func() error {
		if err := JoinNS(ns, unix.CLONE_NEWNS); err != nil {
			return err
		}
		entries, err := os.ReadDir("/")
		if err != nil {
			return err
		}
		if len(entries) != 0 {
			t.Errorf("root of the new namespace holds %v", entries)
		}
		var st unix.Statfs_t
		if err := unix.Statfs("/", &st); err != nil {
			return err
		}
		if st.Type != unix.TMPFS_MAGIC {
			t.Errorf("root is a file system of type %#x", st.Type)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat("/proc/self/status"); err != nil {
		t.Fatalf("the test's own threads moved: %v", err)
	}
}

func TestOnThreadNeverUsesTheMainThread(t *testing.T) {
	var wg sync.WaitGroup
	for range 200 {
		wg.Go(func() {
			if err := OnThread(func() error {
				if unix.Gettid() == unix.Getpid() {
					return errors.New("on the main thread")
				}
				return nil
			}); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
}

func TestFSReportsWhatTheKernelSaid(t *testing.T) {
	needRoot(t)
	_, err := NewFS("overlay").String("lowerdir", "/proc/self/nonexistent").Flag("volatile").Mount(0)
	if err == nil || !strings.Contains(err.Error(), "overlay") {
		t.Fatalf("err = %v", err)
	}
	if _, err := NewFS("nosuchfs").Flag("ro").Mount(0); !errors.Is(err, unix.ENODEV) {
		t.Fatalf("unknown type: %v", err)
	}
}

func TestDetachedMountsAreInNoNamespace(t *testing.T) {
	needRoot(t)
	before, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	m, err := NewFS("tmpfs").Mount(unix.MOUNT_ATTR_NODEV)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	after, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(before, after) {
		t.Error("a detached mount shows in the mount namespace")
	}
}

func TestOpenInStaysInside(t *testing.T) {
	root := t.TempDir()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(os.Mkdir(filepath.Join(root, "etc"), 0o755))
	must(os.WriteFile(filepath.Join(root, "etc/passwd"), []byte("inside"), 0o644))
	must(os.Symlink("/etc/passwd", filepath.Join(root, "abs")))
	must(os.Symlink("../../../../etc/passwd", filepath.Join(root, "etc/up")))
	must(os.Symlink("/proc/self/root/etc/passwd", filepath.Join(root, "magic")))
	must(unix.Mkfifo(filepath.Join(root, "fifo"), 0o644))
	dir, err := os.Open(root)
	must(err)
	defer dir.Close()
	for _, name := range []string{"/etc/passwd", "abs", "etc/up", "../../etc/passwd"} {
		f, err := OpenIn(dir, name, unix.O_RDONLY)
		must(err)
		got := make([]byte, 6)
		_, err = f.Read(got)
		f.Close()
		if err != nil || string(got) != "inside" {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
	if f, err := OpenIn(dir, "magic", unix.O_RDONLY); !errors.Is(err, unix.ENOENT) {
		t.Errorf("magic: %v, %v", f, err)
	}
	f, err := OpenIn(dir, "fifo", unix.O_RDONLY) // must not wait for a writer
	must(err)
	f.Close()
	if f, err := OpenBeneath(dir, "abs", unix.O_RDONLY); err == nil {
		t.Errorf("beneath followed a link: %v", f)
	}
}

func TestLoopFreesItself(t *testing.T) {
	needRoot(t)
	if _, err := os.Stat("/dev/loop-control"); err != nil {
		t.Skipf("this kernel has no loop devices: %v", err)
	}
	img := filepath.Join(t.TempDir(), "img")
	want := bytes.Repeat([]byte("block of"), 1024)
	if err := os.WriteFile(img, want, 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(img)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for _, direct := range []bool{false, true} {
		dev, err := Loop(f, direct)
		if err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(dev.Name())
		if err != nil || !bytes.Equal(got, want) {
			t.Errorf("direct %v: read %d bytes, %v", direct, len(got), err)
		}
		dev.Close()
		out, err := exec.Command("losetup", "-j", img).CombinedOutput()
		if err != nil || len(bytes.TrimSpace(out)) != 0 {
			t.Errorf("direct %v: still attached: %s %v", direct, out, err)
		}
	}
}

func TestParseVersion(t *testing.T) {
	for in, want := range map[string]Version{"6.18.44-fc": {6, 18}, "6.1.0-28-amd64": {6, 1}, "": {}, "x": {}} {
		if got := parseVersion(in); got != want {
			t.Errorf("%q: %v", in, got)
		}
	}
	if v := (Version{6, 15}); !v.AtLeast(6, 12) || v.AtLeast(6, 16) || v.AtLeast(7, 0) || !v.AtLeast(6, 15) {
		t.Error("AtLeast compares wrongly")
	}
}

func TestRaiseFileMax(t *testing.T) {
	needRoot(t)
	if _, err := RaiseFileMax(); err != nil {
		t.Fatal(err)
	}
	if was, err := RaiseFileMax(); err != nil || was != 1<<63-1 {
		t.Fatal(was, err)
	}
}

package hold

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/linux"
	"github.com/opendsec/dsec/process"
)

func TestMain(m *testing.M) {
	beLonely()
	beMarked()
	MainIfAsked(nil)
	_ = os.Setenv("GORACE", "atexit_sleep_ms=0") // for the holds we start
	if len(os.Args) > 1 && os.Args[1] == crashRole {
		crashClient(os.Args[2:])
	}
	os.Exit(m.Run())
}

const busybox = "/bin/busybox"

// bed is a hold of a test's own.
type bed struct {
	t     *testing.T
	c     *Client
	o     Options
	dir   string
	group string // v2 cgroup all of its sandboxes are below
}

var serial atomic.Int64

func needRoot(t *testing.T) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root: uid is", os.Getuid())
	}
	if _, err := forkerImage(); errors.Is(err, errNotBuilt) {
		t.Fatal("run make native first")
	}
	if _, err := os.Stat(busybox); err != nil {
		t.Skip("needs busybox-static:", err)
	}
}

// unified is our own place on the v2 tree.
func unified(t *testing.T) string {
	t.Helper()
	b, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if p, ok := strings.CutPrefix(strings.TrimSpace(line), "0::"); ok {
			for _, base := range []string{"/sys/fs/cgroup/unified", "/sys/fs/cgroup"} {
				if _, err := os.Stat(filepath.Join(base, p, "cgroup.procs")); err == nil {
					return filepath.Join(base, p)
				}
			}
		}
	}
	t.Fatal("no v2 cgroup tree")
	return ""
}

func newBed(t *testing.T, change ...func(*Options)) *bed {
	t.Helper()
	needRoot(t)
	b := &bed{t: t, dir: t.TempDir()}
	b.group = filepath.Join(unified(t), fmt.Sprintf("dsec-hold-test-%d-%d", os.Getpid(), serial.Add(1)))
	if err := os.Mkdir(b.group, 0o755); err != nil {
		t.Fatal(err)
	}
	b.o = Options{Socket: filepath.Join(b.dir, "hold.sock"), Command: SelfCommand(), Cgroup: filepath.Join(b.group, "hold"), Log: filepath.Join(b.dir, "log"), Forkers: 2}
	for _, f := range change {
		f(&b.o)
	}
	c, err := Ensure(ctx(t), b.o)
	if err != nil {
		log, _ := os.ReadFile(b.o.Log)
		t.Fatalf("%v\n%s", err, log)
	}
	b.c = c
	t.Cleanup(b.close)
	return b
}

func (b *bed) close() {
	t := b.t
	c := context.Background()
	pid := b.c.Info().PID
	if err := b.c.Shutdown(c); err != nil {
		t.Error(err)
	}
	_ = b.c.Close()
	poll(t, "hold to end", func() bool { return ended(pid) })
	if t.Failed() {
		log, _ := os.ReadFile(b.o.Log)
		t.Logf("log of hold:\n%s", log)
	}
	var left []string
	_ = filepath.WalkDir(b.group, func(p string, d os.DirEntry, err error) error {
		if err == nil && d.IsDir() {
			left = append(left, p)
		}
		return nil
	})
	for i := len(left) - 1; i >= 0; i-- {
		if strings.Contains(left[i], "/exec-") {
			t.Error("left behind:", left[i])
		}
		poll(t, "empty "+left[i], func() bool { return os.Remove(left[i]) == nil })
	}
}

// ended also counts a process that waits for its parent to reap it.
func ended(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err != nil || strings.HasPrefix(string(b[bytes.LastIndexByte(b, ')'):]), ") Z")
}

func ctx(t *testing.T) context.Context {
	t.Helper()
	c, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	t.Cleanup(cancel)
	return c
}

// poll waits for what has no event.
func poll(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); !ok(); {
		if time.Now().After(end) {
			t.Fatal("waited in vain for", what)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

const (
	testBase  = 3000000
	testCount = 65536
)

// root makes a detached tmpfs with busybox in it, owned by the sandbox's root.
func root(t testing.TB, base int) *os.File {
	t.Helper()
	m, err := linux.NewFS("tmpfs").String("mode", "0755").String("uid", fmt.Sprint(base)).String("gid", fmt.Sprint(base)).Mount(unix.MOUNT_ATTR_NODEV)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = m.Close() })
	at := fmt.Sprintf("/proc/self/fd/%d", m.Fd())
	for _, d := range []string{"bin", "etc", "tmp", "root"} {
		must(t, os.Mkdir(filepath.Join(at, d), 0o755))
	}
	must(t, os.Chmod(filepath.Join(at, "tmp"), 0o1777))
	src, err := os.Open(busybox)
	must(t, err)
	defer func() { _ = src.Close() }()
	dst, err := os.OpenFile(filepath.Join(at, "bin/busybox"), os.O_CREATE|os.O_WRONLY, 0o755)
	must(t, err)
	_, err = io.Copy(dst, src)
	must(t, err)
	must(t, dst.Close())
	for _, a := range applets(t) {
		must(t, os.Symlink("busybox", filepath.Join(at, "bin", a)))
	}
	must(t, os.WriteFile(filepath.Join(at, "etc/passwd"), []byte("root:x:0:0:root:/root:/bin/sh\n"), 0o644))
	must(t, filepath.WalkDir(at+"/", func(p string, d os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		return os.Lchown(p, base, base)
	}))
	return m
}

var appletList []string

func applets(t testing.TB) []string {
	if appletList == nil {
		out, err := exec.Command(busybox, "--list").Output()
		must(t, err)
		for _, a := range strings.Fields(string(out)) {
			if a != "busybox" && !strings.Contains(a, "/") {
				appletList = append(appletList, a)
			}
		}
	}
	return appletList
}

func sysTree(t testing.TB) *os.File {
	t.Helper()
	m, err := linux.NewFS("tmpfs").String("mode", "0755").Mount(walled | unix.MOUNT_ATTR_NOEXEC)
	must(t, err)
	t.Cleanup(func() { _ = m.Close() })
	must(t, os.WriteFile(fmt.Sprintf("/proc/self/fd/%d/known", m.Fd()), []byte("yes\n"), 0o444))
	must(t, linux.SetMountAttr(m, unix.MOUNT_ATTR_RDONLY))
	return m
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// box is a sandbox of a test.
type box struct {
	b     *bed
	id    string
	group string
	spool string
	n     atomic.Int64
}

func (b *bed) spawn(change func(*SpawnSpec)) (*box, *Shell) {
	b.t.Helper()
	x := &box{b: b, id: fmt.Sprintf("sb%d", serial.Add(1))}
	x.group, x.spool = filepath.Join(b.group, x.id), filepath.Join(b.dir, x.id)
	must(b.t, os.Mkdir(x.group, 0o755))
	must(b.t, os.Mkdir(x.spool, 0o700))
	s := SpawnSpec{ID: x.id, UIDBase: testBase, GIDBase: testBase, Count: testCount, Cgroup: x.group,
		Sys: sysTree(b.t), Lo: true}
	if change != nil {
		change(&s)
	}
	sh, err := b.c.Spawn(ctx(b.t), s)
	must(b.t, err)
	b.t.Cleanup(func() { _ = sh.UserNS.Close(); _ = sh.NetNS.Close() })
	return x, sh
}

func (b *bed) box() *box {
	b.t.Helper()
	x, _ := b.spawn(func(s *SpawnSpec) {
		s.Masks, s.ReadOnly = []string{"/proc/kcore", "/proc/acpi"}, []string{"/proc/sys"}
	})
	must(b.t, b.c.Enter(ctx(b.t), EnterSpec{ID: x.id, Root: root(b.t, testBase), Hostname: "box"}))
	return x
}

const dockerCaps = 0xa80425fb

func (x *box) spec(argv ...string) ExecSpec {
	return ExecSpec{Sandbox: x.id, Spec: process.Spec{ID: fmt.Sprintf("e%d", x.n.Add(1)), Argv: argv}, Env: []string{"PATH=/bin", "HOME=/root"},
		Caps: Caps{Bounding: dockerCaps, Permitted: dockerCaps}, OOMScoreAdj: 500, Spool: x.spool}
}

func (x *box) sh(script string) ExecSpec { return x.spec("sh", "-c", script) }

func (x *box) start(s ExecSpec) process.Process {
	x.b.t.Helper()
	p, err := x.b.c.Exec(ctx(x.b.t), s)
	must(x.b.t, err)
	return p
}

// run starts a command, waits, and returns its kept output.
func (x *box) run(s ExecSpec) (process.Result, string, string) {
	x.b.t.Helper()
	return finishCommand(x.b.t, x.start(s))
}

func finishCommand(t testing.TB, p process.Process) (process.Result, string, string) {
	t.Helper()
	c := context.Background()
	r, err := p.Wait(c)
	must(t, err)
	out := kept(t, p, process.Stdout)
	errs := ""
	if p.Spec().PTY == nil {
		errs = kept(t, p, process.Stderr)
	}
	must(t, p.Release(c))
	return r, out, errs
}

func kept(t testing.TB, p process.Process, s process.Stream) string {
	t.Helper()
	head, tail, _, err := p.Kept(context.Background(), s)
	must(t, err)
	return string(append(append([]byte{}, head...), tail...))
}

// follow reads a stream from an offset to its end.
func follow(t testing.TB, p process.Process, s process.Stream, offset int64) (first int64, data []byte) {
	t.Helper()
	r, err := p.Follow(context.Background(), s, offset)
	must(t, err)
	defer func() { _ = r.Close() }()
	first = -1
	var buf bytes.Buffer
	for {
		c, err := r.Next(context.Background())
		must(t, err)
		if first < 0 {
			first = c.Offset
		}
		buf.Write(c.Data)
		if c.EOF {
			return first, buf.Bytes()
		}
	}
}

func wantClass(t testing.TB, err error, c dsec.Class, text string) {
	t.Helper()
	if dsec.ClassOf(err) != c || !strings.Contains(fmt.Sprint(err), text) {
		t.Fatalf("error %v (%s), want %s with %q", err, dsec.ClassOf(err), c, text)
	}
}

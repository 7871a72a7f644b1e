package files

import (
	"bytes"
	"context"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
)

// serveEnv makes the test binary a helper that serves a directory over fd 3.
const serveEnv = "DSEC_TEST_SERVE"

func TestMain(m *testing.M) {
	if root := os.Getenv(serveEnv); root != "" {
		l, err := NewLocal(root)
		if err != nil {
			panic(err)
		}
		conn, err := net.FileConn(os.NewFile(3, "socket"))
		if err != nil {
			panic(err)
		}
		if err := Serve(context.Background(), conn, l, 0); err != nil {
			panic(err)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// service is a file service under test and the directory that is its root.
type service struct {
	fs   FS
	root string
}

func (s service) host(path string) string { return filepath.Join(s.root, path) }

// each runs a test against Local and against a Client over Serve.
func each(t *testing.T, fn func(t *testing.T, s service)) {
	t.Run("local", func(t *testing.T) {
		root := newRoot(t)
		fn(t, service{local(t, root), root})
	})
	t.Run("client", func(t *testing.T) {
		root := newRoot(t)
		fn(t, service{connected(t, local(t, root), unix.SOCK_STREAM), root})
	})
}

func newRoot(t *testing.T) string {
	root := t.TempDir()
	if err := os.Chmod(root, 0o755); err != nil {
		t.Fatal(err)
	}
	return root
}

func local(t *testing.T, root string) *Local {
	l, err := NewLocal(root)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

func socketPair(t testing.TB, kind int) (a, b net.Conn) {
	fds, err := unix.Socketpair(unix.AF_UNIX, kind|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	conns := make([]net.Conn, 2)
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "socket")
		if conns[i], err = net.FileConn(f); err != nil {
			t.Fatal(err)
		}
		f.Close()
	}
	return conns[0], conns[1]
}

func connected(t *testing.T, fs FS, kind int) *Client {
	a, b := socketPair(t, kind)
	served := make(chan error, 1)
	go func() { served <- Serve(context.Background(), b, fs, 0) }()
	c := NewClient(a)
	t.Cleanup(func() {
		c.Close()
		if err := <-served; err != nil {
			t.Errorf("serve: %v", err)
		}
	})
	return c
}

// asUser starts a helper process with another uid over root.
func asUser(t *testing.T, root string, uid uint32) *Client {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	mine, theirs := os.NewFile(uintptr(fds[0]), "mine"), os.NewFile(uintptr(fds[1]), "theirs")
	self, err := os.Open("/proc/self/exe") // its directory may be closed to others
	if err != nil {
		t.Fatal(err)
	}
	defer self.Close()
	cmd := exec.Command("/proc/self/fd/4")
	cmd.Env = append(os.Environ(), serveEnv+"="+root)
	cmd.Dir, cmd.Stderr = "/", os.Stderr
	cmd.ExtraFiles = []*os.File{theirs, self}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	theirs.Close()
	conn, err := net.FileConn(mine)
	mine.Close()
	if err != nil {
		t.Fatal(err)
	}
	c := NewClient(conn)
	t.Cleanup(func() {
		c.Close()
		_ = cmd.Wait()
	})
	return c
}

// openTo makes every directory up to root passable for others.
func openTo(t *testing.T, root string) {
	for d := root; d != "/" && d != os.TempDir(); d = filepath.Dir(d) {
		if err := os.Chmod(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
}

func wantClass(t *testing.T, err error, class dsec.Class, parts ...string) {
	t.Helper()
	if dsec.ClassOf(err) != class {
		t.Fatalf("error %v has class %q, want %q", err, dsec.ClassOf(err), class)
	}
	for _, p := range parts {
		if !strings.Contains(err.Error(), p) {
			t.Errorf("error %q does not say %q", err, p)
		}
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func put(t *testing.T, s service, path, content string) {
	t.Helper()
	_, err := s.fs.Write(t.Context(), path, strings.NewReader(content), WriteOptions{Parents: true})
	must(t, err)
}

func get(t *testing.T, s service, path string) string {
	t.Helper()
	var b bytes.Buffer
	n, err := s.fs.Read(t.Context(), path, 0, -1, &b)
	must(t, err)
	if n != int64(b.Len()) {
		t.Fatalf("read says %d bytes, wrote %d", n, b.Len())
	}
	return b.String()
}

func ptr[T any](v T) *T { return &v }

// noise is n reproducible bytes.
func noise(n int64) io.Reader {
	return io.LimitReader(rand.NewChaCha8([32]byte{1}), n)
}

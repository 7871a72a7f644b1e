package fuse

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) {
	if os.Getenv("DSEC_FUSE_SERVER") != "" {
		serveForTest()
		return
	}
	os.Exit(m.Run())
}

// pattern is a file whose bytes follow from their places.
type pattern struct {
	size int64
	wait func(ctx context.Context, off int64) error
}

func (p pattern) Size() int64 { return p.size }

func (p pattern) ReadAt(ctx context.Context, b []byte, off int64) (int, error) {
	if p.wait != nil {
		if err := p.wait(ctx, off); err != nil {
			return 0, err
		}
	}
	n := int(min(int64(len(b)), p.size-off))
	if n <= 0 {
		return 0, nil
	}
	fillPattern(b[:n], off)
	return n, nil
}

func fillPattern(b []byte, off int64) {
	for i := range b {
		at := off + int64(i)
		b[i] = byte(at) ^ byte(at>>8)*31 ^ byte(at>>16)*17
	}
}

func check(b []byte, off int64) error {
	want := make([]byte, len(b))
	fillPattern(want, off)
	if !bytes.Equal(b, want) {
		return fmt.Errorf("wrong bytes in [%d, %d)", off, off+int64(len(b)))
	}
	return nil
}

const testSize = 64<<20 + 123

// open opens the root of a mount. Not by os.Open, which would have the runtime
// wait for events of it, and so for an answer of who may be this process.
func open(t *testing.T, mount *os.File) *os.File {
	t.Helper()
	fd, err := unix.Open(fmt.Sprintf("/proc/self/fd/%d", mount.Fd()), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	return os.NewFile(uintptr(fd), "layer")
}

// server serves a mount in a process of its own: a process that reads what it
// serves itself can stand still for ever.
type server struct {
	t   *testing.T
	dev *os.File
	j   *os.File
	cmd *exec.Cmd
}

func (s *server) start() {
	s.t.Helper()
	c := exec.Command("/proc/self/exe")
	c.Env = append(os.Environ(), "DSEC_FUSE_SERVER=1")
	c.ExtraFiles, c.Stderr = []*os.File{s.dev, s.j}, os.Stderr
	if err := c.Start(); err != nil {
		s.t.Fatal(err)
	}
	s.cmd = c
}

func (s *server) kill() {
	_ = s.cmd.Process.Signal(syscall.SIGKILL)
	_ = s.cmd.Wait()
}

// session mounts a file that a server serves.
func session(t *testing.T) (*server, *os.File) {
	t.Helper()
	dev, mount, err := Mount()
	if err != nil {
		t.Fatal(err)
	}
	j, err := NewJournal()
	if err != nil {
		t.Fatal(err)
	}
	s := &server{t: t, dev: dev, j: j}
	s.start()
	f := open(t, mount)
	mount.Close()
	t.Cleanup(func() {
		f.Close()
		if err := s.cmd.Wait(); err != nil {
			t.Errorf("the last server: %v", err)
		}
		j.Close()
		dev.Close()
	})
	return s, f
}

// Descriptors of a serving process.
const (
	serverDev     = 3
	serverJournal = 4
)

// serveForTest serves; SIGUSR1 has its store away until SIGUSR2.
func serveForTest() {
	var away atomic.Bool
	sig := make(chan os.Signal, 1)
	signal.Notify(sig, syscall.SIGUSR1, syscall.SIGUSR2)
	go func() {
		for x := range sig {
			away.Store(x == syscall.SIGUSR1)
		}
	}()
	src := pattern{size: testSize, wait: func(context.Context, int64) error {
		time.Sleep(time.Duration(rand.IntN(3)) * time.Millisecond) // what a store takes
		if away.Load() {
			return errors.New("away")
		}
		return nil
	}}
	_ = unix.SetNonblock(serverDev, true)
	if err := Serve(context.Background(), os.NewFile(serverDev, "dev"), os.NewFile(serverJournal, "journal"), src); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func TestReads(t *testing.T) {
	_, f := session(t)
	if st, err := f.Stat(); err != nil || st.Size() != testSize {
		t.Fatalf("%v, %v", st, err)
	}
	for _, at := range []int64{0, 1, 4095, 1 << 20, testSize - 10, testSize - 70000} {
		b := make([]byte, 1<<17)
		n, err := f.ReadAt(b, at)
		if err != nil && err != io.EOF {
			t.Fatal(err)
		}
		if err := check(b[:n], at); err != nil {
			t.Error(err)
		}
	}
	if n, err := f.ReadAt(make([]byte, 1), testSize); n != 0 || err != io.EOF {
		t.Errorf("behind the end: %d, %v", n, err)
	}
	m, err := unix.Mmap(int(f.Fd()), 0, testSize, unix.PROT_READ, unix.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(m)
	if err := check(m[5<<20:6<<20], 5<<20); err != nil {
		t.Error(err)
	}
}

// TestErrorsAreNotKept: a read that failed is asked again.
func TestErrorsAreNotKept(t *testing.T) {
	srv, f := session(t)
	b := make([]byte, 4096)
	if _, err := f.ReadAt(b, 0); err != nil {
		t.Fatal(err)
	}
	_ = srv.cmd.Process.Signal(syscall.SIGUSR1)
	failed := false
	for at := int64(8 << 20); at < testSize-4096 && !failed; at += 2 << 20 { // the signal takes a moment
		_, err := f.ReadAt(b, at)
		if failed = err != nil; failed && !errors.Is(err, unix.EIO) {
			t.Errorf("read: %v", err)
		}
	}
	if !failed {
		t.Fatal("reads go on without a store")
	}
	_ = srv.cmd.Process.Signal(syscall.SIGUSR2)
	for end := time.Now().Add(10 * time.Second); ; {
		if _, err := f.ReadAt(b, testSize-8192); err == nil {
			break
		} else if time.Now().After(end) {
			t.Fatalf("still: %v", err)
		}
	}
	if err := check(b, testSize-8192); err != nil {
		t.Error(err)
	}
}

// TestKilledServersLoseNothing: readers wait while nobody serves, and every byte
// is right, however often the server is killed.
func TestKilledServersLoseNothing(t *testing.T) {
	srv, f := session(t)
	length := 5 * time.Second
	if os.Getenv("DSEC_LONG") != "" {
		length = 2 * time.Minute
	}
	end := time.Now().Add(length)
	var readers sync.WaitGroup
	var reads [8]int
	for r := range reads {
		readers.Go(func() {
			b := make([]byte, 300<<10)
			for time.Now().Before(end) {
				at := rand.Int64N(testSize - int64(len(b)))
				if _, err := f.ReadAt(b, at); err != nil {
					t.Errorf("read: %v", err)
					return
				}
				if err := check(b, at); err != nil {
					t.Error(err)
					return
				}
				reads[r]++
				_ = unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED)
			}
		})
	}
	kills := 0
	for time.Now().Before(end) {
		time.Sleep(time.Duration(rand.IntN(60)) * time.Millisecond)
		srv.kill()
		srv.start()
		kills++
	}
	readers.Wait()
	total := 0
	for _, n := range reads {
		total += n
	}
	t.Logf("%d reads, %d kills", total, kills)
	if total == 0 || kills == 0 {
		t.Error("nothing was tried")
	}
}

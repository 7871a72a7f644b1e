package linux

import (
	"errors"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestSealWaitsForPages that a pipe has in its hands, longer than the kernel does.
func TestSealWaitsForPages(t *testing.T) {
	fd, err := unix.MemfdCreate("seal", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "seal")
	defer func() { _ = f.Close() }()
	if _, err := f.WriteAt(make([]byte, 4096), 0); err != nil {
		t.Fatal(err)
	}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = errors.Join(r.Close(), w.Close()) }()
	if n, err := unix.Splice(fd, new(int64), int(w.Fd()), nil, 4096, 0); n != 4096 || err != nil {
		t.Fatal(n, err)
	}
	if err := seal(f, 0); !errors.Is(err, unix.EBUSY) {
		t.Fatalf("with a page in a pipe: %v", err)
	}
	sealed := make(chan error, 1)
	begun := time.Now()
	go func() { sealed <- seal(f, time.Minute) }()
	select { // the kernel's own patience is less
	case err := <-sealed:
		t.Fatalf("after %v with a page in a pipe: %v", time.Since(begun), err)
	case <-time.After(time.Second):
	}
	if _, err := r.Read(make([]byte, 4096)); err != nil {
		t.Fatal(err)
	}
	if err := <-sealed; err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt([]byte{1}, 0); !errors.Is(err, unix.EPERM) {
		t.Errorf("written after it was sealed: %v", err)
	}
}

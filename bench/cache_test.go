package bench

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

func TestResidentCountsWhatWasReadAndNotDropped(t *testing.T) {
	dir, err := os.MkdirTemp("/var/tmp", "resident") // not a tmpfs, whose pages cannot be dropped
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "f")
	if err := os.WriteFile(path, make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if n, err := resident(f, 1<<20); err != nil || n != 1<<20 {
		t.Fatalf("%d bytes of what was just written: %v", n, err)
	}
	if err := unix.Fdatasync(int(f.Fd())); err != nil {
		t.Fatal(err)
	}
	if err := unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED); err != nil {
		t.Fatal(err)
	}
	if n, err := resident(f, 1<<20); err != nil || n != 0 {
		t.Errorf("%d bytes of what was dropped: %v", n, err)
	}
}

func TestEveryFileBelowADirectoryIsSeen(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"a", "d/b", "d/e/c"} {
		if err := os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), []byte(name), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	root, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	var bytes int64
	files := 0
	err = eachFile(root, func(_ *os.File, size int64) error {
		files++
		bytes += size
		return nil
	})
	if err != nil || files != 3 || bytes != 1+3+5 {
		t.Errorf("%d files of %d bytes: %v", files, bytes, err)
	}
}

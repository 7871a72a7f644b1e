package reads

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

func TestReadsAreRecordedInOrder(t *testing.T) {
	dir := t.TempDir()
	a, b := filepath.Join(dir, "a"), filepath.Join(dir, "b")
	for _, p := range []string{a, b} {
		if err := os.WriteFile(p, bytes.Repeat([]byte("x"), 1<<20), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	r, err := Watch(a, b)
	if errors.Is(err, unix.EPERM) || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP) {
		t.Skipf("this kernel, user or file system has no pre-content events: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	want := []Read{{a, 4096, 8192}, {b, 0, 4096}, {a, 524288, 4096}}
	for _, w := range want {
		f, err := os.Open(w.File)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.ReadAt(make([]byte, w.Len), w.Off); err != nil {
			t.Fatal(err)
		}
		f.Close()
	}
	got, err := r.Take()
	if err != nil || len(got) != len(want) {
		t.Fatalf("%v, %v", got, err)
	}
	for i := range want {
		if got[i] != want[i] {
			t.Errorf("read %d: %+v, want %+v", i, got[i], want[i])
		}
	}
	if again, _ := r.Take(); len(again) != 0 {
		t.Errorf("taken twice: %v", again)
	}
}

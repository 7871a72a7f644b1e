package erofs

import (
	"bytes"
	"io"
	"os"
	"slices"
	"testing"
)

// ranges is a file with data at some places, which counts what is read.
type ranges struct {
	at    []int64
	each  int64
	read  int64
	fails error // of every read but the first
}

func (r *ranges) NextData(off int64) (start, end int64, err error) {
	for _, at := range r.at {
		if off < at+r.each {
			return max(at, off), at + r.each, nil
		}
	}
	return off, off, nil
}

func (r *ranges) ReadAt(b []byte, off int64) (int, error) {
	if r.fails != nil && r.read > 0 {
		return 0, r.fails
	}
	r.read += int64(len(b))
	for i := range b {
		b[i] = 0
		if at := off + int64(i); slices.ContainsFunc(r.at, func(a int64) bool { return a <= at && at < a+r.each }) {
			b[i] = byte(at>>12) | 1
		}
	}
	return len(b), nil
}

func TestHolesAreNotRead(t *testing.T) {
	f, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	const size = 3 << 40 // units of 64 MiB
	src := &ranges{each: BlockSize}
	for off := int64(5 << 30); off < size; off += 100 << 30 {
		src.at = append(src.at, off, off+3*BlockSize, off+1<<20)
	}
	d := NewData(f)
	runs, err := d.AppendSparse(src, size)
	if err != nil {
		t.Fatal(err)
	}
	if want := int64(len(src.at)) * BlockSize; src.read != want {
		t.Errorf("%d bytes were read of a file that holds %d", src.read, want)
	}
	if len(runs) != len(src.at)/3 {
		t.Fatalf("%d runs", len(runs))
	}
	for _, at := range src.at {
		i := slices.IndexFunc(runs, func(r Run) bool { return r.Off <= at && at < r.Off+int64(r.Count)*BlockSize })
		if i < 0 {
			t.Fatalf("nothing at %d", at)
		}
		want, got := make([]byte, 2*BlockSize), make([]byte, 2*BlockSize)
		_, _ = src.ReadAt(want, at)
		if _, err := f.ReadAt(got, int64(runs[i].Block)*BlockSize+at-runs[i].Off); err != nil || !bytes.Equal(want, got) {
			t.Errorf("at %d: other bytes, %v", at, err)
		}
	}
}

func TestAnErrorOfTheFileEndsItSoon(t *testing.T) {
	f, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	src := &ranges{at: []int64{0}, each: 1 << 30, fails: io.ErrNoProgress}
	if _, err := NewData(f).AppendSparse(src, 1<<30); err != io.ErrNoProgress || src.read > 64<<10 {
		t.Errorf("%v after %d bytes", err, src.read)
	}
}

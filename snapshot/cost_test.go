package snapshot

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/image"
)

// seemingDisk is a directory on which a file can seem as large as one likes.
func seemingDisk(t *testing.T) (dir string, src Source) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("a pack needs root and this test runs without it")
	}
	dir, err := os.MkdirTemp("/dev/shm", "dsec-pack-")
	must(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	up, err := os.Open(dir)
	must(t, err)
	t.Cleanup(func() { up.Close() })
	return dir, Source{Upper: up, IDs: 65536}
}

// sprinkle writes a byte here and there into a file.
func sprinkle(t *testing.T, name string, size, each int64) {
	t.Helper()
	f, err := os.Create(name)
	must(t, err)
	defer f.Close()
	for off := int64(0); off < size; off += each {
		_, err := f.WriteAt([]byte{1}, off)
		must(t, err)
	}
	must(t, f.Truncate(size))
}

// packedInto packs and returns how large the data file became, whatever came of it.
func packedInto(t *testing.T, pack func(image.Files) error) (size int64, err error) {
	t.Helper()
	meta, data := tempFile(t), tempFile(t)
	err = pack(filesOf(meta, data))
	st, statErr := data.Stat()
	must(t, statErr)
	return st.Size(), err
}

func tempFile(t *testing.T) *os.File {
	t.Helper()
	f, err := os.CreateTemp(t.TempDir(), "")
	must(t, err)
	t.Cleanup(func() { f.Close() })
	return f
}

func TestAScatteredFileIsRefusedWhileItIsRead(t *testing.T) {
	dir, src := seemingDisk(t)
	sprinkle(t, dir+"/f", 2850<<30, 10<<30)
	size, err := packedInto(t, func(f image.Files) error {
		_, err := Pack(t.Context(), src, f, Options{})
		return err
	})
	if dsec.ClassOf(err) != dsec.Invalid || !strings.Contains(err.Error(), "/f: data scattered") || size > 2<<30 {
		t.Errorf("%v, after %d bytes", err, size)
	}
}

// TestWhatIsReadAheadIsBoundedToo: what reading ahead leaves to the reading is
// refused there.
func TestWhatIsReadAheadIsBoundedToo(t *testing.T) {
	dir, src := seemingDisk(t)
	sprinkle(t, dir+"/f", 2850<<30, 10<<30)
	defer func(was time.Duration) { clockLag = was }(clockLag)
	clockLag = -time.Hour // all of it is settled
	must(t, os.WriteFile(dir+"/plain", []byte("plain"), 0o644))
	size, err := packedInto(t, func(f image.Files) error {
		k := NewPacking(f, Options{})
		must(t, k.ReadAhead(t.Context(), src))
		return k.Read(t.Context(), src)
	})
	if dsec.ClassOf(err) != dsec.Invalid || !strings.Contains(err.Error(), "scattered") || size > 2<<30 {
		t.Errorf("%v, after %d bytes", err, size)
	}
}

// endsAfter is a context that is over when it was looked at some times.
type endsAfter struct {
	context.Context
	looks int
}

func (c *endsAfter) Err() error {
	if c.looks--; c.looks < 0 {
		return context.Canceled
	}
	return nil
}

func TestACancelledPackEndsWithinAFile(t *testing.T) {
	dir, src := seemingDisk(t)
	must(t, os.WriteFile(dir+"/f", bytes.Repeat([]byte("data"), 16<<20), 0o644))
	size, err := packedInto(t, func(f image.Files) error {
		_, err := Pack(&endsAfter{t.Context(), 20}, src, f, Options{})
		return err
	})
	if dsec.ClassOf(err) != dsec.Canceled || size == 0 || size > 4<<20 {
		t.Errorf("%v, after %d bytes", err, size)
	}
}

func TestWhatOnePackReadsIsBounded(t *testing.T) {
	dir, src := seemingDisk(t)
	must(t, os.WriteFile(dir+"/f", bytes.Repeat([]byte("data"), 1<<20), 0o644))
	size, err := packedInto(t, func(f image.Files) error {
		_, err := Pack(t.Context(), src, f, Options{MaxBytes: 1 << 20})
		return err
	})
	if dsec.ClassOf(err) != dsec.Invalid || !strings.Contains(err.Error(), "more than 1048576 bytes") || size > 1<<20 {
		t.Errorf("%v, after %d bytes", err, size)
	}
	// A file system that cannot tell where holes are has them read.
	p := &packer{ctx: t.Context(), opts: Options{MaxBytes: DefaultBytes}, data: NewPacking(image.Files{}, Options{}).data}
	p.held = 1 << 20
	if err := p.spend(1 << 30); err != nil {
		t.Error(err)
	}
	if err := p.spend(costFactor << 20); err != nil {
		t.Error(err)
	}
	if err := p.spend(1); err == nil || !strings.Contains(err.Error(), "of files that hold 1048576") {
		t.Error(err)
	}
}

// watching is a scrub that sees a file, and the file.
func watching(t *testing.T, s *scrubber, name string) (*watched, *contents) {
	t.Helper()
	f, err := os.Open(name)
	must(t, err)
	t.Cleanup(func() { f.Close() })
	st, err := stat(f)
	must(t, err)
	c := &contents{f: f, size: st.Size, spend: func(int64) error { return nil }}
	return s.watch(c, st, "f"), c
}

func TestHolesAreNotLookedAt(t *testing.T) {
	dir := t.TempDir()
	name := dir + "/f"
	must(t, os.WriteFile(name, []byte(strings.Repeat("some text\n", 820)), 0o644))
	f, err := os.OpenFile(name, os.O_WRONLY, 0)
	must(t, err)
	defer f.Close()
	_, err = f.WriteAt([]byte("ghp_"+strings.Repeat("a", 36)), 1_000_000)
	must(t, err)
	s := newScrubber(dsec.ScrubAll(), nil)
	w, c := watching(t, s, name)
	_, err = NewPacking(image.Files{Data: tempFile(t)}, Options{}).data.AppendSparse(c, c.size)
	must(t, err)
	if len(w.head) > 32<<10 {
		t.Errorf("%d bytes are looked at of a file that holds 12 KiB", len(w.head))
	}
	if _, err := w.verdict(c.size); err != nil || s.report.SuspiciousCount != 1 {
		t.Errorf("%v, %+v: what follows a hole is not seen", err, s.report)
	}
}

// TestHolesAreNotHashedInVain: a secret of some bytes is in no file of a GiB.
func TestHolesAreNotHashedInVain(t *testing.T) {
	dir, src := seemingDisk(t)
	must(t, os.WriteFile(dir+"/.netrc", []byte("machine x password topsecretvalue"), 0o644))
	for i := range 4 {
		must(t, os.WriteFile(fmt.Sprint(dir, "/f", i), nil, 0o644))
		must(t, os.Truncate(fmt.Sprint(dir, "/f", i), 1<<30))
	}
	s := newScrubber(dsec.ScrubAll(), nil)
	s.sizes[33] = true
	if w, _ := watching(t, s, dir+"/f0"); w.h != nil {
		t.Error("it is compared with what has another size")
	}
	if w, _ := watching(t, s, dir+"/.netrc"); w.h == nil {
		t.Error("it is not compared with what has its size")
	}
	// Of an answer the size is not known: some are hashed, of the others it is said.
	rules := dsec.Scrub{Credentials: true}
	for _, want := range []int64{0, 3} {
		if want > 0 {
			rules.Answers = []string{fmt.Sprintf("%x", sha256.Sum256([]byte("x")))}
		}
		got, err := packInto(t, src, Options{Scrub: rules})
		must(t, err)
		if got.Report.Unread != want || got.Report.RemovedCount != 1 {
			t.Errorf("%+v, want %d unread", got.Report, want)
		}
	}
	// One that holds as much as it has holes is compared in any case.
	half := bytes.Repeat([]byte("half"), 1<<18)
	must(t, os.WriteFile(dir+"/z", half, 0o644))
	must(t, os.Truncate(dir+"/z", 2<<20))
	rules.Answers[0] = fmt.Sprintf("%x", sha256.Sum256(append(half, make([]byte, 1<<20)...)))
	got, err := packInto(t, src, Options{Scrub: rules})
	must(t, err)
	if got.Report.Unread != 3 || got.Report.RemovedCount != 2 {
		t.Errorf("%+v", got.Report)
	}
	// Where it turns out while it is read, that is said as well.
	s = newScrubber(rules, nil)
	w, c := watching(t, s, dir+"/f1")
	s.holes = 1 << 20
	if _, err := w.verdict(c.size); err != nil || w.h != nil || len(s.unread) != 1 {
		t.Errorf("%v, %d unread", err, len(s.unread))
	}
}

// TestLookingIsCounted: the first walk of a scrub reads, too.
func TestLookingIsCounted(t *testing.T) {
	dir, src := seemingDisk(t)
	for i := range 8 {
		must(t, os.MkdirAll(fmt.Sprint(dir, "/", i), 0o755))
		must(t, os.WriteFile(fmt.Sprint(dir, "/", i, "/.env"), bytes.Repeat([]byte("x"), maxLooked), 0o644))
	}
	rules := dsec.Scrub{Patterns: []string{"/*/.env"}} // none is read but to know its copies
	if _, err := packInto(t, src, Options{Scrub: rules, MaxBytes: 4 << 20}); dsec.ClassOf(err) != dsec.Invalid {
		t.Error(err)
	}
	_, err := packInto(t, src, Options{Scrub: rules, MaxBytes: 8 << 20})
	must(t, err)
}

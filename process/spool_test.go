package process

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"math/rand"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/opendsec/dsec"
)

var update = flag.Bool("update", false, "write golden files")

func newSpool(t *testing.T, head, tail int64) (*SpoolWriter, string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "spool")
	w, err := NewLazySpoolWriter(func() (*os.File, error) { return os.Create(path) }, head, tail)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = w.Close() })
	return w, path
}

func open(t *testing.T, w *SpoolWriter, path string) *SpoolFile {
	t.Helper()
	if b, ok := w.Image(); ok {
		path = filepath.Join(t.TempDir(), "image")
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return OpenSpool(f)
}

func pattern(n int) []byte {
	b := make([]byte, n)
	r := rand.New(rand.NewSource(1))
	r.Read(b)
	return b
}

func TestGoldenSpool(t *testing.T) {
	path := filepath.Join(t.TempDir(), "spool")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	w, err := NewSpoolWriter(f, 8, 4)
	if err != nil {
		t.Fatal(err)
	}
	w.Write([]byte("0123456789abcdefXYZ"), nil)
	w.End()
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	golden := filepath.Join("testdata", "spool.golden")
	if *update {
		if err := os.WriteFile(golden, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil || !bytes.Equal(got, want) {
		t.Fatal("the format changed: raise its version", err)
	}
	g, err := os.Open(golden)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = g.Close() }()
	head, tail, off, err := OpenSpool(g).Kept()
	if err != nil || string(head) != "01234567" || string(tail) != "fXYZ" || off != 15 {
		t.Fatalf("%q %q %d %v", head, tail, off, err)
	}
	h, err := OpenSpool(g).Header()
	if s := h.Summary(); err != nil || s != (OutputSummary{Total: 19, Dropped: 7, Truncated: true}) || !h.EOF {
		t.Fatalf("%+v %v", h, err)
	}
}

func TestKeptHeadAndTailForEveryLength(t *testing.T) {
	data := pattern(100 << 10)
	for _, n := range []int{0, 1, 999, 1000, 1001, 16 << 10, 20000, 21000, 50000, 100 << 10} {
		w, path := newSpool(t, 1000, 20000)
		for rest := data[:n]; len(rest) > 0; {
			k := min(len(rest), 777)
			w.Write(rest[:k], nil)
			rest = rest[k:]
		}
		head, tail, off, err := open(t, w, path).Kept()
		if err != nil || !bytes.Equal(head, data[:min(n, 1000)]) || !bytes.Equal(tail, data[off:n]) {
			t.Fatalf("%d: %d %d %d %v", n, len(head), len(tail), off, err)
		}
		gap := off - int64(len(head))
		if s := w.Header().Summary(); s.Total != int64(n) || s.Dropped != gap || s.Truncated != (gap > 0) {
			t.Fatalf("%d: gap %d %+v", n, gap, s)
		}
	}
}

// TestFollowersSeeEveryByte runs a writer and followers that begin at
// different offsets; while they are attached nothing they want is overwritten.
func TestFollowersSeeEveryByte(t *testing.T) {
	data := pattern(3 << 20)
	w, path := newSpool(t, 10000, 30000)
	var wg sync.WaitGroup
	for _, from := range []int64{0, 5, 10000, 39999} {
		c, err := w.Follow(from)
		if err != nil {
			t.Fatal(err)
		}
		c.acked = from // it has read what is before, though nothing is written yet
		wg.Go(func() {
			r := NewLazyReader(func() (*SpoolFile, error) { f, err := os.Open(path); return OpenSpool(f), err }, c, from, nil)
			pos := from
			for {
				ch, err := r.Next(context.Background())
				if err != nil || ch.Offset != pos || !bytes.Equal(ch.Data, data[pos:pos+int64(len(ch.Data))]) {
					t.Errorf("from %d: chunk at %d, want %d: %v", from, ch.Offset, pos, err)
					break
				}
				if pos += int64(len(ch.Data)); ch.EOF {
					break
				}
			}
			if pos != int64(len(data)) {
				t.Errorf("from %d: ended at %d", from, pos)
			}
			if err := r.Close(); err != nil {
				t.Error(err)
			}
		})
	}
	for rest := data; len(rest) > 0; {
		k := min(len(rest), 7777)
		w.Write(rest[:k], nil)
		rest = rest[k:]
	}
	w.End()
	wg.Wait()
	if s := w.Header().Summary(); s.Dropped != 0 || !s.Truncated {
		t.Fatalf("%+v", s)
	}
}

func TestFollowingWhatIsGoneJumps(t *testing.T) {
	w, path := newSpool(t, 100, 50)
	w.Write(pattern(20000), nil)
	w.End()
	c, err := w.Follow(0)
	if err != nil {
		t.Fatal(err)
	}
	r := NewReader(open(t, w, path), c, 0, nil)
	var offsets []int64
	for {
		ch, err := r.Next(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		if len(ch.Data) > 0 {
			offsets = append(offsets, ch.Offset)
		}
		if ch.EOF {
			break
		}
	}
	if offsets[0] != 0 || offsets[1] != 19950 {
		t.Fatal(offsets)
	}
}

func TestStopEndsTheWaitForAFollower(t *testing.T) {
	w, _ := newSpool(t, 10, 10)
	c, err := w.Follow(0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	stop := make(chan struct{})
	done := make(chan struct{})
	go func() { w.Write(pattern(100), stop); close(done) }()
	close(stop)
	<-done
	if h := w.Header(); h.Total != 100 || h.Dropped != 80 {
		t.Fatalf("%+v", h)
	}
}

func TestNoFileDropsAndCounts(t *testing.T) {
	w, err := NewLazySpoolWriter(func() (*os.File, error) { return nil, errors.New("disk full") }, 0, 0)
	if err != nil {
		t.Fatal(err)
	}
	data := pattern(100000)
	w.Write(data[:1000], nil)
	w.Write(data[1000:], nil)
	w.End()
	if s := w.Header().Summary(); s.Total != 100000 || s.Dropped != 99000 {
		t.Fatalf("%+v", s)
	}
	head, tail, _, err := open(t, w, "").Kept()
	if err != nil || !bytes.Equal(head, data[:1000]) || len(tail) != 0 {
		t.Fatal(len(head), len(tail), err)
	}
}

// TestFollowingWithoutAFileSkipsWhatIsNowhere: a full disk must neither end the
// follower nor make it invent bytes.
func TestFollowingWithoutAFileSkipsWhatIsNowhere(t *testing.T) {
	for _, total := range []int{spoolMemory, spoolMemory + 1, 20_000, 3 << 20} {
		w, err := NewLazySpoolWriter(func() (*os.File, error) { return nil, errors.New("disk full") }, 0, 0)
		if err != nil {
			t.Fatal(err)
		}
		data := pattern(total)
		w.Write(data[:1000], nil)
		c, err := w.Follow(0)
		if err != nil {
			t.Fatal(err)
		}
		image := func() (*SpoolFile, error) {
			b, ok := w.Image()
			if !ok {
				t.Error("there is a file")
			}
			path := filepath.Join(t.TempDir(), "image")
			err := os.WriteFile(path, b, 0o600)
			f, oerr := os.Open(path)
			t.Cleanup(func() { _ = f.Close() })
			return OpenSpool(f), errors.Join(err, oerr)
		}
		r := NewLazyReader(image, c, 0, nil)
		go func() {
			for rest := data[1000:]; len(rest) > 0; {
				n := min(len(rest), 5000)
				w.Write(rest[:n], nil)
				rest = rest[n:]
			}
			w.End()
		}()
		var pos int64
		for eof := false; !eof; {
			ch, err := r.Next(t.Context())
			if err != nil {
				t.Fatalf("%d: %v", total, err)
			}
			if len(ch.Data) > 0 && (ch.Offset < pos || !bytes.Equal(ch.Data, data[ch.Offset:ch.Offset+int64(len(ch.Data))])) {
				t.Fatalf("%d: %d bytes at %d are not what was written", total, len(ch.Data), ch.Offset)
			}
			pos, eof = ch.Offset+int64(len(ch.Data)), ch.EOF
		}
		if pos > int64(total) || total <= spoolMemory && pos != int64(total) {
			t.Fatalf("%d: ended at %d", total, pos)
		}
		_ = r.Close()
	}
}

func TestTooManyFollowers(t *testing.T) {
	w, _ := newSpool(t, 0, 0)
	for range MaxFollowers {
		if _, err := w.Follow(0); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := w.Follow(0); dsec.ClassOf(err) != dsec.ResourceExhausted || !errors.Is(err, ErrFollowers) {
		t.Fatal(err)
	}
}

func FuzzSpoolHeader(f *testing.F) {
	f.Add(SpoolHeader{Head: 1, Tail: 1}.Encode())
	f.Add(SpoolHeader{Head: 1 << 20, Tail: 1 << 20, Total: 1 << 40, Dropped: 7, EOF: true}.Encode())
	f.Fuzz(func(t *testing.T, b []byte) {
		h, err := DecodeSpoolHeader(b)
		if err != nil {
			if dsec.ClassOf(err) != dsec.Corrupt {
				t.Fatal(err)
			}
			return
		}
		again, err := DecodeSpoolHeader(h.Encode())
		if err != nil || again != h || h.Start() < h.Head {
			t.Fatalf("%+v %+v %v", h, again, err)
		}
	})
}

func FuzzSpoolFile(f *testing.F) {
	golden, err := os.ReadFile("testdata/spool.golden")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(golden)
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) >= spoolHeader { // get past the checksum
			h := SpoolHeader{Head: int64(b[8]), Tail: int64(b[16]) + 1, Total: int64(b[24]) | int64(b[25])<<8}
			copy(b, h.Encode())
		}
		path := filepath.Join(t.TempDir(), "s")
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		s, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = s.Close() }()
		if head, tail, off, err := OpenSpool(s).Kept(); err == nil && (int64(len(head)) > off || len(tail) > 256) {
			t.Fatal(len(head), len(tail), off)
		}
	})
}

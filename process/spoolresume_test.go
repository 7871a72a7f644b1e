package process

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"
)

// TestSpoolGoesOnInTheNextProgram hands a spool over after each of many writes
// and compares it with one that stayed.
func TestSpoolGoesOnInTheNextProgram(t *testing.T) {
	data := pattern(100 << 10)
	plain, plainPath := newSpool(t, 20<<10, 10<<10)
	path := filepath.Join(t.TempDir(), "spool")
	create := func() (*os.File, error) { return os.Create(path) }
	w, err := NewLazySpoolWriter(create, 20<<10, 10<<10)
	if err != nil {
		t.Fatal(err)
	}
	never := make(chan struct{})
	close(never) // no follower is waited for
	for at := 0; at < len(data); at += 3000 {
		piece := data[at:min(at+3000, len(data))]
		plain.Write(piece, never)
		w.Write(piece, never)
		s, f := w.State()
		b, err := json.Marshal(s)
		if err != nil {
			t.Fatal(err)
		}
		var r SpoolState
		if err := json.Unmarshal(b, &r); err != nil {
			t.Fatal(err)
		}
		if w, err = ResumeSpoolWriter(r, f, create); err != nil {
			t.Fatal(err)
		}
	}
	plain.End()
	w.End()
	if a, b := plain.Header(), w.Header(); a != b {
		t.Fatalf("%+v, want %+v", b, a)
	}
	h1, t1, o1, err1 := open(t, plain, plainPath).Kept()
	h2, t2, o2, err2 := open(t, w, path).Kept()
	if err1 != nil || err2 != nil || !bytes.Equal(h1, h2) || !bytes.Equal(t1, t2) || o1 != o2 {
		t.Fatal(err1, err2, len(h1), len(h2), len(t1), len(t2), o1, o2)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	s, _ := w.State()
	if w, err = ResumeSpoolWriter(s, nil, create); err != nil {
		t.Fatal(err)
	}
	if _, ok := w.Image(); ok || w.Close() == nil {
		t.Fatal("a spool with a closed file became one in memory")
	}
}

func TestHaltedWriteReturnsTheRest(t *testing.T) {
	w, _ := newSpool(t, 4, 8)
	c, err := w.Follow(0)
	if err != nil {
		t.Fatal(err)
	}
	halt := make(chan struct{})
	close(halt)
	if rest := w.WriteUntil([]byte("0123456789abcdef"), nil, halt); string(rest) != "cdef" {
		t.Fatalf("%q", rest)
	}
	if s, _ := w.State(); len(s.Followers) != 1 || s.Followers[0] != 0 || s.Header.Total != 12 {
		t.Fatalf("%+v", s)
	}
	_ = c.Close()
	if rest := w.WriteUntil([]byte("cdef"), nil, halt); rest != nil {
		t.Fatalf("%q", rest)
	}
}

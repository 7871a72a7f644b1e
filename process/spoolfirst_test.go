package process

import (
	"bytes"
	"context"
	"os"
	"testing"
	"time"
)

// Who starts a command and then follows it misses nothing, however fast the
// command writes.
func TestFirstFollowerMissesNothing(t *testing.T) {
	data := pattern(1 << 20)
	w, path := newSpool(t, 10000, 30000)
	go func() {
		w.Write(data, nil)
		w.End()
	}()
	deadline := time.Now().Add(5 * time.Second)
	for w.Header().Total < 40000 && time.Now().Before(deadline) { // as much as is kept
		time.Sleep(time.Millisecond)
	}
	c, err := w.Follow(0)
	if err != nil {
		t.Fatal(err)
	}
	r := NewLazyReader(func() (*SpoolFile, error) { f, err := os.Open(path); return OpenSpool(f), err }, c, 0, nil)
	defer r.Close()
	var got bytes.Buffer
	for {
		ch, err := r.Next(context.Background())
		if err != nil || ch.Offset != int64(got.Len()) {
			t.Fatalf("chunk at %d, want %d: %v", ch.Offset, got.Len(), err)
		}
		got.Write(ch.Data)
		if ch.EOF {
			break
		}
	}
	if !bytes.Equal(got.Bytes(), data) {
		t.Fatalf("%d of %d bytes", got.Len(), len(data))
	}
}

func TestCommandNobodyFollowsWaitsOnceAndShortly(t *testing.T) {
	w, _ := newSpool(t, 10000, 30000)
	begun := time.Now()
	w.Write(pattern(2<<20), nil)
	if took := time.Since(begun); took > 20*firstFollower {
		t.Fatalf("took %v", took)
	}
	if s := w.Header().Summary(); s.Total != 2<<20 || s.Dropped == 0 {
		t.Fatalf("%+v", s)
	}
}

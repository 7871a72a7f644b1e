package retry

import (
	"bytes"
	"context"
	"errors"
	"io"
	"iter"
	"math/rand/v2"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob"
	"github.com/opendsec/dsec/blob/bucket"
	"github.com/opendsec/dsec/internal/within"
)

// flaky fails calls, and breaks readers and listings, a number of times.
type flaky struct {
	blob.Store
	left, open atomic.Int32
	most       int32 // bodies open at one time
}

func (f *flaky) fails() bool { return f.left.Add(-1) >= 0 }

var errAway = dsec.Errorf(dsec.Unavailable, "call", "store", "away")

func (f *flaky) Open(ctx context.Context, key string, off, n int64) (io.ReadCloser, error) {
	if f.fails() {
		return nil, errAway
	}
	r, err := f.Store.Open(ctx, key, off, n)
	if err != nil {
		return nil, err
	}
	f.most = max(f.most, f.open.Add(1))
	return &body{f, r, rand.IntN(4)}, nil
}

// body breaks after a few bytes, with some of them or behind them.
type body struct {
	f  *flaky
	r  io.ReadCloser
	at int
}

func (b *body) Read(p []byte) (int, error) {
	if b.f.left.Load() <= 0 {
		return b.r.Read(p)
	}
	n, err := b.r.Read(p[:min(len(p), b.at)])
	if b.at -= n; b.at == 0 && b.f.fails() {
		return n, errAway
	}
	return n, err
}

func (b *body) Close() error {
	b.f.open.Add(-1)
	return b.r.Close()
}

func (f *flaky) Put(ctx context.Context, key string, r io.Reader, o blob.PutOptions) error {
	if f.fails() {
		_, _ = io.CopyN(io.Discard, r, 2)
		return errAway
	}
	return f.Store.Put(ctx, key, r, o)
}

func (f *flaky) List(ctx context.Context, prefix string) iter.Seq2[blob.Info, error] {
	return func(yield func(blob.Info, error) bool) {
		n := 0
		for i, err := range f.Store.List(ctx, prefix) {
			if n++; n > 2 && f.fails() {
				yield(blob.Info{}, errAway)
				return
			}
			if !yield(i, err) {
				return
			}
		}
	}
}

func broken(t *testing.T, p Policy) (*flaky, blob.Store) {
	t.Helper()
	m, err := bucket.Open(t.Context(), "mem://")
	if err != nil {
		t.Fatal(err)
	}
	f := &flaky{Store: m}
	if p.wait == nil {
		p.wait = func(ctx context.Context, _ time.Duration) error { return ctx.Err() }
	}
	return f, New(f, p)
}

func TestAReadThatBreaksIsResumedWhereItWas(t *testing.T) {
	f, s := broken(t, Policy{Tries: 3})
	want := make([]byte, 100)
	for i := range want {
		want[i] = byte(i)
	}
	if err := blob.PutBytes(t.Context(), s, "k", want, blob.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	for range 200 {
		off, n := rand.Int64N(100), rand.Int64N(120)-1
		f.left.Store(2) // fewer than the tries, wherever they fall
		end := int64(100)
		if n >= 0 {
			end = min(end, off+n)
		}
		r, err := s.Open(t.Context(), "k", off, n)
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(r)
		if err = errors.Join(err, r.Close()); err != nil || !bytes.Equal(got, want[off:end]) {
			t.Fatalf("%d+%d: %v, %v", off, n, got, err)
		}
	}
	if f.most != 1 || f.open.Load() != 0 {
		t.Errorf("%d bodies open at one time, %d now", f.most, f.open.Load())
	}
}

func TestTriesAreCountedAnewAfterEveryByte(t *testing.T) {
	// One failure for each byte, which may come with the byte before it.
	f, s := broken(t, Policy{Tries: 3})
	if err := blob.PutBytes(t.Context(), s, "k", []byte("0123456789"), blob.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	r, err := s.Open(t.Context(), "k", 0, -1)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	for i := range 10 {
		f.left.Store(1)
		b := make([]byte, 1)
		if n, err := io.ReadFull(r, b); err != nil || b[0] != byte('0'+i) {
			t.Fatalf("byte %d: %q, %d, %v", i, b, n, err)
		}
	}
}

func TestGivesUp(t *testing.T) {
	var told int
	f, s := broken(t, Policy{Tries: 3, Retried: func(error) { told++ }})
	f.left.Store(100)
	if _, err := s.Open(t.Context(), "k", 0, -1); !errors.Is(err, dsec.Unavailable.Err()) {
		t.Errorf("a store that stays away: %v", err)
	}
	if left := f.left.Load(); left != 97 || told != 2 {
		t.Errorf("%d tries, %d told", 100-left, told)
	}
	f.left.Store(0)
	if _, err := s.Stat(t.Context(), "unknown"); !errors.Is(err, dsec.NotFound.Err()) || told != 2 {
		t.Errorf("what will not change was tried again: %v", err)
	}
}

func TestAPutIsTriedAgainFromWhereItsBodyWas(t *testing.T) {
	f, s := broken(t, Policy{Tries: 3})
	body := strings.NewReader("skipped, written")
	if _, err := body.Seek(9, io.SeekStart); err != nil {
		t.Fatal(err)
	}
	f.left.Store(2)
	if err := s.Put(t.Context(), "k", body, blob.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	if b, err := blob.ReadAll(t.Context(), s, "k", 99); err != nil || string(b) != "written" {
		t.Errorf("%q, %v", b, err)
	}
	f.left.Store(1)
	if err := s.Put(t.Context(), "k", io.MultiReader(strings.NewReader("x")), blob.PutOptions{}); !errors.Is(err, dsec.Unavailable.Err()) {
		t.Errorf("a body that is gone: %v", err)
	}
}

func TestAListingIsResumedBehindItsLastKey(t *testing.T) {
	f, s := broken(t, Policy{Tries: 2})
	want := []string{"a", "b", "c", "d", "e", "f", "g"}
	for _, k := range want {
		if err := blob.PutBytes(t.Context(), s, k, nil, blob.PutOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	f.left.Store(1)
	var got []string
	for i, err := range s.List(t.Context(), "") {
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, i.Key)
	}
	if !slices.Equal(got, want) || f.left.Load() >= 0 {
		t.Errorf("%v, %d", got, f.left.Load())
	}
}

func TestWaitsGrowAndAreJittered(t *testing.T) {
	for _, c := range []struct {
		jitter float64
		want   []time.Duration
	}{
		{0, []time.Duration{50, 100, 200, 250, 250}},
		{1, []time.Duration{100, 200, 400, 500, 500}},
	} {
		var got []time.Duration
		f, s := broken(t, Policy{Tries: 6, First: 100, Most: 500, jitter: func() float64 { return c.jitter },
			wait: func(_ context.Context, d time.Duration) error { got = append(got, d); return nil }})
		f.left.Store(100)
		_, err := s.Open(t.Context(), "k", 0, -1)
		if err == nil || !slices.Equal(got, c.want) {
			t.Errorf("%v, want %v", got, c.want)
		}
	}
}

func TestAContextThatEndsStopsTheWaiting(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	f, s := broken(t, Policy{First: time.Hour, Most: time.Hour, wait: func(ctx context.Context, d time.Duration) error {
		cancel()
		return within.Sleep(ctx, d)
	}})
	f.left.Store(100)
	if _, err := s.Open(ctx, "k", 0, -1); !errors.Is(err, dsec.Canceled.Err()) || !strings.Contains(err.Error(), "away") {
		t.Errorf("cancelled: %v", err)
	}
	ctx, cancel2 := context.WithTimeout(t.Context(), time.Minute)
	defer cancel2()
	if _, err := s.Open(ctx, "k", 0, -1); !errors.Is(err, dsec.Unavailable.Err()) {
		t.Errorf("no time to try again: %v", err)
	}
}

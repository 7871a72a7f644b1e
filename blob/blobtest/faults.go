package blobtest

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob"
	"github.com/opendsec/dsec/blob/fault"
)

// Breakable is a store behind something that can be told what goes wrong.
type Breakable struct {
	blob.Store
	Set func(fault.Faults)
}

// RunFaults checks that a store that gives up what hangs and tries again what
// was away says what is wrong, and works again when it is over. Its patience
// must be a fraction of a second: every fault is waited for.
func RunFaults(t *testing.T, factory func(t *testing.T) Breakable) {
	for name, test := range map[string]func(*testing.T, Breakable){
		"says what is wrong": says, "heals by itself": heals, "bytes come once": once, "a put is all or nothing": allOrNothing,
		"wrong bytes": wrong, "deadline": late,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel() // it is waiting that takes time
			b := factory(t)
			t.Cleanup(func() {
				b.Set(fault.Faults{})
				if err := b.Close(); err != nil {
					t.Error("close:", err)
				}
			})
			test(t, b)
		})
	}
}

func random(n int) []byte {
	b := make([]byte, n)
	_, _ = rand.NewChaCha8([32]byte{byte(n)}).Read(b) // never fails
	return b
}

// says: what each fault is called, and that it is over when it is over.
func says(t *testing.T, b Breakable) {
	want := random(100) // small: a stalled read is resumed as long as bytes come
	if err := blob.PutBytes(context.Background(), b, "k", want, blob.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	for _, mode := range fault.Modes {
		class, ok := map[fault.Mode]dsec.Class{fault.Forbidden: dsec.PermissionDenied, fault.Missing: dsec.NotFound, fault.Corrupt: ""}[mode]
		if !ok {
			class = dsec.Unavailable
		}
		b.Set(fault.Faults{Mode: mode})
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		var wg sync.WaitGroup
		for what, call := range calls(ctx, b, mode) {
			wg.Go(func() {
				if err := call(); dsec.ClassOf(err) != class {
					t.Errorf("%s: %s: %v, want %s", mode, what, err, class)
				}
			})
		}
		wg.Wait()
		cancel()
		b.Set(fault.Faults{})
		if got, err := blob.ReadAll(context.Background(), b, "k", 1<<20); err != nil || !bytes.Equal(got, want) {
			t.Errorf("after %s: %d bytes, %v", mode, len(got), err)
		}
	}
}

// calls are those that a mode breaks.
func calls(ctx context.Context, b blob.Store, mode fault.Mode) map[string]func() error {
	c := map[string]func() error{
		"read":   func() error { _, err := blob.ReadAll(ctx, b, "k", 1<<20); return err },
		"put":    func() error { return blob.PutBytes(ctx, b, "new-"+string(mode), random(100<<10), blob.PutOptions{}) },
		"stat":   func() error { _, err := b.Stat(ctx, "k"); return err },
		"list":   func() error { return firstError(ctx, b) },
		"delete": func() error { return b.Delete(ctx, "other") },
	}
	switch mode {
	case fault.Stall, fault.Cut: // those have no body
		delete(c, "stat")
		delete(c, "list")
		delete(c, "delete")
	case fault.Missing: // of a key that is written or deleted it is none of ours; of all keys it is the bucket
		return map[string]func() error{"read": c["read"]}
	}
	return c
}

func firstError(ctx context.Context, b blob.Store) error {
	for _, err := range b.List(ctx, "") {
		if err != nil {
			return err
		}
	}
	return nil
}

// heals: faults of some requests are not seen at all.
func heals(t *testing.T, b Breakable) {
	want := random(300 << 10)
	for _, mode := range []fault.Mode{fault.Hang, fault.Stall, fault.Cut, fault.Throttled, fault.Unavailable} {
		var first int64 = -1
		b.Set(fault.Faults{Mode: mode, Latency: time.Millisecond, Match: func(r fault.Request) bool {
			if first < 0 {
				first = r.N
			}
			return (r.N-first)%2 == 0 // every other one
		}})
		key := "k-" + string(mode)
		if err := blob.PutBytes(context.Background(), b, key, want, blob.PutOptions{}); err != nil {
			t.Errorf("%s: put: %v", mode, err)
		}
		if got, err := blob.ReadAll(context.Background(), b, key, 1<<20); err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s: %d bytes, %v", mode, len(got), err)
		}
		if i, err := b.Stat(context.Background(), key); err != nil || i.Size != int64(len(want)) {
			t.Errorf("%s: stat %+v, %v", mode, i, err)
		}
		if err := firstError(context.Background(), b); err != nil {
			t.Errorf("%s: list: %v", mode, err)
		}
	}
}

// once: ranges of an object that is cut again and again.
func once(t *testing.T, b Breakable) {
	want := random(2 << 20)
	if err := blob.PutBytes(context.Background(), b, "k", want, blob.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	b.Set(fault.Faults{Mode: fault.Cut, Match: func(r fault.Request) bool { return r.N%2 != 0 }})
	for range 20 {
		off, n := rand.Int64N(int64(len(want))), rand.Int64N(1<<20)
		end := min(off+n, int64(len(want)))
		r, err := b.Open(context.Background(), "k", off, n)
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(r)
		if err = errors.Join(err, r.Close()); err != nil || !bytes.Equal(got, want[off:end]) {
			t.Fatalf("%d+%d: %d bytes, %v", off, n, len(got), err)
		}
	}
}

// allOrNothing: a put that failed has changed nothing, or all of it.
func allOrNothing(t *testing.T, b Breakable) {
	old, next := random(50<<10), random(20<<20)
	if err := blob.PutBytes(context.Background(), b, "k", old, blob.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	for _, mode := range []fault.Mode{fault.Cut, fault.Unavailable, fault.Refuse} {
		b.Set(fault.Faults{Mode: mode, Match: func(r fault.Request) bool { return r.N%3 == 2 }})
		err := b.Put(context.Background(), "k", onlyReader{bytes.NewReader(next)}, blob.PutOptions{})
		b.Set(fault.Faults{})
		got, rerr := blob.ReadAll(context.Background(), b, "k", 32<<20)
		switch {
		case rerr != nil:
			t.Errorf("%s: %v", mode, rerr)
		case bytes.Equal(got, next):
		case err == nil:
			t.Errorf("%s: put said it was written, now %d bytes", mode, len(got))
		case !bytes.Equal(got, old):
			t.Errorf("%s: put said %v, now %d bytes that were never whole", mode, err, len(got))
		}
	}
}

// wrong: objects are not verified here, so that wrong bytes come as any.
func wrong(t *testing.T, b Breakable) {
	want := random(10_000)
	if err := blob.PutBytes(context.Background(), b, "k", want, blob.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	b.Set(fault.Faults{Mode: fault.Corrupt})
	if got, err := blob.ReadAll(context.Background(), b, "k", 1<<20); err != nil || len(got) != len(want) || bytes.Equal(got, want) {
		t.Errorf("%d bytes, equal %v, %v", len(got), bytes.Equal(got, want), err)
	}
}

// late: the caller's deadline is its own.
func late(t *testing.T, b Breakable) {
	if err := blob.PutBytes(context.Background(), b, "k", random(1000), blob.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	b.Set(fault.Faults{Mode: fault.Hang})
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
	defer cancel()
	if _, err := blob.ReadAll(ctx, b, "k", 1<<20); !errors.Is(err, dsec.Timeout.Err()) {
		t.Error(err)
	}
}

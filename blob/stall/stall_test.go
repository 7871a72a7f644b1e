package stall

import (
	"context"
	"errors"
	"io"
	"testing"
	"testing/synctest"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob"
	"github.com/opendsec/dsec/blob/blobtest"
	"github.com/opendsec/dsec/blob/bucket"
	"github.com/opendsec/dsec/blob/fault"
)

func TestConformance(t *testing.T) {
	blobtest.Run(t, func(t *testing.T) blob.Store {
		m, err := bucket.Open(t.Context(), "mem://")
		if err != nil {
			t.Fatal(err)
		}
		return New(m, Limits{})
	})
}

// hung is a store that can be made to hang; its time is the bubble's.
func hung(t *testing.T, l Limits) (*fault.Store, blob.Store) {
	t.Helper()
	m, err := bucket.Open(t.Context(), "mem://")
	if err != nil {
		t.Fatal(err)
	}
	f := fault.New(m)
	if err := blob.PutBytes(t.Context(), f, "k", make([]byte, 1000), blob.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	return f, New(f, l)
}

func TestWhatDoesNotMoveIsGivenUpInTime(t *testing.T) {
	calls := map[string]func(ctx context.Context, s blob.Store) error{
		"open":   func(ctx context.Context, s blob.Store) error { _, err := blob.ReadAll(ctx, s, "k", 1000); return err },
		"stat":   func(ctx context.Context, s blob.Store) error { _, err := s.Stat(ctx, "k"); return err },
		"delete": func(ctx context.Context, s blob.Store) error { return s.Delete(ctx, "k") },
		"put": func(ctx context.Context, s blob.Store) error {
			return blob.PutBytes(ctx, s, "k", make([]byte, 10), blob.PutOptions{})
		},
		"list": func(ctx context.Context, s blob.Store) (err error) {
			for _, err = range s.List(ctx, "") {
			}
			return err
		},
	}
	for name, call := range calls {
		for _, mode := range []fault.Mode{fault.Hang, fault.Stall} {
			if mode == fault.Stall && name != "open" && name != "put" {
				continue // no body
			}
			t.Run(name+" "+string(mode), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					f, s := hung(t, Limits{Read: time.Minute, Write: time.Minute})
					f.Set(fault.Faults{Mode: mode})
					began := time.Now()
					if err := call(t.Context(), s); !errors.Is(err, dsec.Unavailable.Err()) {
						t.Errorf("got %v", err)
					}
					if d := time.Since(began); d != time.Minute {
						t.Errorf("after %v", d)
					}
					ctx, cancel := context.WithTimeout(t.Context(), time.Second)
					defer cancel()
					if err := call(ctx, s); !errors.Is(err, dsec.Timeout.Err()) {
						t.Errorf("the caller's deadline came first: %v", err)
					}
					f.Set(fault.Faults{})
					if err := call(t.Context(), s); err != nil {
						t.Errorf("it works again, but %v", err)
					}
				})
			})
		}
	}
}

type pausing struct{ n int }

func (p *pausing) Read(b []byte) (int, error) {
	if p.n--; p.n < 0 {
		return 0, io.EOF
	}
	time.Sleep(time.Hour)
	return copy(b, "x"), nil
}

func TestTheCallersPausesDoNotCount(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, s := hung(t, Limits{Read: time.Second, Write: time.Second})
		f.Set(fault.Faults{Latency: time.Second / 2}) // slow, but not stalled
		r, err := s.Open(t.Context(), "k", 0, -1)
		if err != nil {
			t.Fatal(err)
		}
		for range 3 {
			time.Sleep(time.Hour)
			if _, err := io.ReadFull(r, make([]byte, 100)); err != nil {
				t.Fatal(err)
			}
		}
		if err := r.Close(); err != nil {
			t.Fatal(err)
		}
		if err := s.Put(t.Context(), "k", &pausing{3}, blob.PutOptions{}); err != nil {
			t.Errorf("a slow body: %v", err)
		}
		for _, err := range s.List(t.Context(), "") {
			if err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Hour)
		}
	})
}

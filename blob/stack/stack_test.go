package stack_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob"
	"github.com/opendsec/dsec/blob/blobtest"
	"github.com/opendsec/dsec/blob/bucket"
	"github.com/opendsec/dsec/blob/fault"
	"github.com/opendsec/dsec/blob/hedge"
	"github.com/opendsec/dsec/blob/limit"
	"github.com/opendsec/dsec/blob/retry"
	"github.com/opendsec/dsec/blob/s3test"
	"github.com/opendsec/dsec/blob/stack"
	"github.com/opendsec/dsec/blob/stall"
)

// impatient gives up soon enough for a test.
var impatient = stack.Options{Retry: retry.Policy{Tries: 4, First: 10 * time.Millisecond},
	Stall: stall.Limits{Read: 400 * time.Millisecond, Write: 600 * time.Millisecond}, Hedge: hedge.Options{Known: 4}}

func open(t *testing.T, url string) blob.Store {
	t.Helper()
	b, err := bucket.Open(context.Background(), url)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestConformance(t *testing.T) {
	server := s3test.Start(t)
	var n atomic.Int32
	for name, factory := range map[string]func(*testing.T) blob.Store{
		"file": func(t *testing.T) blob.Store { return stack.New(open(t, "file://"+t.TempDir()), stack.Options{}) },
		"s3": func(t *testing.T) blob.Store {
			return stack.New(open(t, server.URL(fmt.Sprint("p", n.Add(1)))), stack.Options{})
		},
	} {
		t.Run(name, func(t *testing.T) { blobtest.Run(t, factory) })
	}
}

func TestFaults(t *testing.T) {
	for name, factory := range map[string]func(*testing.T) blobtest.Breakable{
		"file": func(t *testing.T) blobtest.Breakable {
			f := fault.New(open(t, "file://"+t.TempDir()))
			return blobtest.Breakable{Store: stack.New(f, impatient), Set: f.Set}
		},
		"s3": func(t *testing.T) blobtest.Breakable {
			server := s3test.Start(t)
			return blobtest.Breakable{Store: stack.New(open(t, server.URL("p")), impatient), Set: server.Proxy.Set}
		},
	} {
		t.Run(name, func(t *testing.T) { blobtest.RunFaults(t, factory) })
	}
}

func TestAServerThatIsKilledAndComesBack(t *testing.T) {
	server := s3test.Start(t)
	o := impatient
	o.Retry = retry.Policy{Tries: 2, First: time.Millisecond}
	s := stack.New(open(t, server.URL("")), o)
	defer s.Close()
	if err := blob.PutBytes(t.Context(), s, "k", []byte("x"), blob.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := server.Stop(); err != nil {
		t.Fatal(err)
	}
	if _, err := blob.ReadAll(t.Context(), s, "k", 1); !errors.Is(err, dsec.Unavailable.Err()) {
		t.Errorf("a server that is gone: %v", err)
	}
	if err := server.Restart(); err != nil {
		t.Fatal(err)
	}
	if b, err := blob.ReadAll(t.Context(), s, "k", 1); err != nil || string(b) != "x" {
		t.Errorf("a server that is back: %q, %v", b, err)
	}
}

func TestWhatIsCounted(t *testing.T) {
	m := open(t, "mem://")
	f := fault.New(m)
	var told atomic.Int64
	o := impatient
	o.Retry.Retried = func(error) { told.Add(1) }
	s := stack.New(f, o)
	ctx := t.Context()
	if err := blob.PutBytes(ctx, s, "k", make([]byte, 1000), blob.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	f.Set(fault.Faults{Mode: fault.Unavailable, Match: func(r fault.Request) bool { return r.Op == "open" && r.N == 1 }})
	if _, err := blob.ReadAll(ctx, s, "k", 1000); err != nil {
		t.Fatal(err)
	}
	r, err := s.Open(ctx, "k", 0, 10)
	if err != nil {
		t.Fatal(err)
	}
	if n := s.Stats().InFlight; n != 1 {
		t.Errorf("%d in flight while one is read", n)
	}
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	for range s.List(ctx, "") {
	}
	if err := s.Delete(ctx, "k"); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Stat(ctx, "k"); err == nil {
		t.Error("it is still there")
	}
	got := s.Stats()
	for op, want := range map[string]int64{"open": 3, "put": 1, "stat": 1, "list": 1, "delete": 1} {
		if got.Requests[op] != want {
			t.Errorf("%d of %s, want %d", got.Requests[op], op, want)
		}
	}
	if got.Written != 1000 || got.Read != 1010 || got.Retries != 1 || told.Load() != 1 || got.InFlight != 0 ||
		got.Failures[dsec.Unavailable] != 1 || got.Failures[dsec.NotFound] != 1 || len(got.Failures) != 2 {
		t.Errorf("%+v", got)
	}
}

// Tries, hedges and their losers together stay within the limit of the host.
func TestTheLimitHoldsForAll(t *testing.T) {
	server := s3test.Start(t)
	base := open(t, server.URL(""))
	b := &watched{Store: base}
	o := impatient
	o.Limiter = limit.NewLimiter(limit.Limits{Requests: 4})
	o.Retry.Tries = 6
	s := stack.New(b, o)
	defer s.Close()
	if err := blob.PutBytes(t.Context(), s, "k", make([]byte, 100<<10), blob.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	server.Proxy.Set(fault.Faults{Mode: fault.Hang, Latency: 2 * time.Millisecond, Match: func(r fault.Request) bool { return r.N%20 == 0 }})
	var wg sync.WaitGroup
	for range 12 {
		wg.Go(func() {
			for range 20 {
				if b, err := blob.ReadAll(t.Context(), s, "k", 1<<20); err != nil || len(b) != 100<<10 {
					t.Errorf("%d bytes, %v", len(b), err)
				}
			}
		})
	}
	wg.Wait()
	if most := b.most.Load(); most > 4 {
		t.Errorf("%d at one time", most)
	}
	if got := s.Stats(); got.Limit.Waits == 0 {
		t.Errorf("nobody waited: %+v", got)
	}
}

package limit

import (
	"context"
	"errors"
	"io"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob"
	"github.com/opendsec/dsec/blob/blobtest"
	"github.com/opendsec/dsec/blob/bucket"
)

func mem(t *testing.T) blob.Store {
	t.Helper()
	m, err := bucket.Open(t.Context(), "mem://")
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func TestConformance(t *testing.T) {
	blobtest.Run(t, func(t *testing.T) blob.Store { return New(mem(t), NewLimiter(Limits{Requests: 2, Bandwidth: 1 << 30})) })
}

// busy counts the requests at one time.
type busy struct {
	blob.Store
	now, most atomic.Int64
}

func (b *busy) Open(ctx context.Context, key string, off, n int64) (io.ReadCloser, error) {
	now := b.now.Add(1)
	for {
		most := b.most.Load()
		if now <= most || b.most.CompareAndSwap(most, now) {
			break
		}
	}
	r, err := b.Store.Open(ctx, key, off, n)
	if err != nil {
		b.now.Add(-1)
		return nil, err
	}
	return &busyReader{r, b}, nil
}

type busyReader struct {
	io.ReadCloser
	b *busy
}

func (r *busyReader) Close() error {
	r.b.now.Add(-1)
	return r.ReadCloser.Close()
}

func TestNeverMoreThanTheLimitWhoeverShares(t *testing.T) {
	b := &busy{Store: mem(t)}
	if err := blob.PutBytes(t.Context(), b, "k", []byte("x"), blob.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	l := NewLimiter(Limits{Requests: 3})
	var wg sync.WaitGroup
	for _, s := range []blob.Store{New(b, l), New(b, l)} {
		for range 8 {
			wg.Go(func() {
				for range 50 {
					if _, err := blob.ReadAll(t.Context(), s, "k", 1); err != nil {
						t.Error(err)
					}
					if _, err := s.Open(t.Context(), "unknown", 0, 1); !errors.Is(err, dsec.NotFound.Err()) {
						t.Error(err)
					}
				}
			})
		}
	}
	wg.Wait()
	if most := b.most.Load(); most > 3 {
		t.Errorf("%d at one time", most)
	}
	if release, ok := l.Try(); !ok {
		t.Error("a place was not given back")
	} else {
		release()
		release() // once is enough
	}
}

func TestWhoWaitsLongestIsNext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := NewLimiter(Limits{Requests: 1})
		release, _ := l.Try()
		var order []int
		for i := range 10 {
			go func() {
				r, err := l.acquire(context.Background(), "read object", "k")
				if err != nil {
					t.Error(err)
					return
				}
				order = append(order, i)
				r()
			}()
			synctest.Wait()
		}
		if _, ok := l.Try(); ok {
			t.Error("somebody overtook those who wait")
		}
		time.Sleep(time.Second)
		release()
		synctest.Wait()
		for i, who := range order {
			if i != who {
				t.Fatalf("order %v", order)
			}
		}
		if s := l.Stats(); len(order) != 10 || s.Waits != 10 || s.Waited != 10*time.Second {
			t.Errorf("%d came; %+v", len(order), s)
		}
	})
}

func TestAContextEndsTheWaiting(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := NewLimiter(Limits{Requests: 1})
		s := New(mem(t), l)
		release, _ := l.Try()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := s.Stat(ctx, "k"); !errors.Is(err, dsec.Timeout.Err()) {
			t.Error(err)
		}
		release()
		if _, err := s.Stat(t.Context(), "k"); !errors.Is(err, dsec.NotFound.Err()) {
			t.Errorf("after it: %v", err)
		}
	})
}

// The clock of the bubble is exact, so that the rate is.
func TestBytesOfASecondAreShared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const rate, size = 1 << 20, 4 << 20
		m := mem(t)
		if err := blob.PutBytes(t.Context(), m, "k", make([]byte, size), blob.PutOptions{}); err != nil {
			t.Fatal(err)
		}
		l := NewLimiter(Limits{Bandwidth: rate})
		s := New(m, l)
		began := time.Now()
		var ends [2]time.Duration
		var wg sync.WaitGroup
		for i := range ends {
			wg.Go(func() {
				if _, err := blob.ReadAll(t.Context(), s, "k", size); err != nil {
					t.Error(err)
				}
				ends[i] = time.Since(began)
			})
		}
		wg.Wait()
		want := 2 * size / rate * time.Second
		// Each ends late: one that the other waited for would end at half the time. Who
		// is next is for the scheduler to say, so they do not end together.
		for _, e := range ends {
			if e > want || e < want*3/4 {
				t.Errorf("ended after %v, want all but %v", ends, want)
			}
		}
		if s := l.Stats(); s.Throttled < want {
			t.Errorf("%+v", s)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := blob.PutBytes(ctx, s, "w", make([]byte, size), blob.PutOptions{}); !errors.Is(err, dsec.Timeout.Err()) {
			t.Errorf("a write that cannot end in time: %v", err)
		}
	})
}

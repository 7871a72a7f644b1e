package ondemand

import (
	"context"
	"io"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob"
	"github.com/opendsec/dsec/blob/fault"
)

// slow is a store each of whose requests takes so long.
type slow struct {
	blob.Store
	takes time.Duration
}

func (s slow) Open(ctx context.Context, key string, off, n int64) (io.ReadCloser, error) {
	select {
	case <-time.After(s.takes):
		return s.Store.Open(ctx, key, off, n)
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// TestWaitingForALaneIsNotBeingLate: what is ordered ahead stands behind more than
// can be fetched within the deadline of one request, and all of it comes, also for
// who joins it at the last moment.
func TestWaitingForALaneIsNotBeingLate(t *testing.T) {
	o := newOrigin(t, mostGap+1, noise(12, 1000)...) // no two in one request
	synctest.Test(t, func(t *testing.T) {
		l := o.open(t, Options{Blobs: slow{o.store, 9 * time.Second}, Lanes: NewLanes(2), Deadline: 10 * time.Second})
		var all sync.WaitGroup
		all.Go(func() {
			if err := l.Fill(context.Background()); err != nil {
				t.Errorf("fill: %v", err)
			}
		})
		time.Sleep(9*time.Second + 900*time.Millisecond) // all but two wait in the queue, for almost the deadline
		for i := range 12 {
			if l.parts.Present.Has(i) {
				continue
			}
			all.Go(func() {
				if err := l.Ensure(context.Background(), l.offs[i], 1); err != nil {
					t.Errorf("chunk %d: %v", i, err)
				}
			})
			break
		}
		all.Wait()
		if s := l.Stats(); !l.Complete() || s.Failures > 0 || s.Requests != 12 {
			t.Errorf("%+v", s)
		}
	})
}

// TestWhoJoinsAnOldRequestHasATimeOfItsOwn: that it fails by its age is not told
// to who came to wait for it a moment before.
func TestWhoJoinsAnOldRequestHasATimeOfItsOwn(t *testing.T) {
	o := newOrigin(t, 0, noise(1, 1000)...)
	synctest.Test(t, func(t *testing.T) {
		l := o.open(t, Options{Deadline: 10 * time.Second})
		o.store.Set(fault.Faults{Mode: fault.Hang})
		var all sync.WaitGroup
		all.Go(func() {
			if err := l.Ensure(context.Background(), 0, 1); dsec.ClassOf(err) != dsec.Timeout {
				t.Errorf("the first: %v", err)
			}
		})
		time.Sleep(9 * time.Second)
		o.store.Set(fault.Faults{})
		for range 5 {
			all.Go(func() {
				if err := l.Ensure(context.Background(), 0, 1); err != nil {
					t.Errorf("who joined: %v", err)
				}
			})
		}
		all.Wait()
		if s := l.Stats(); s.Failures != 1 || s.Requests != 2 {
			t.Errorf("%+v", s)
		}
	})
}

package runtimetest

import (
	"context"
	"sync"
	"time"
)

// clock is a sandbox's: it stands still while the sandbox is paused.
type clock struct {
	mu      sync.Mutex
	paused  bool
	changed chan struct{} // closed and replaced at each pause and resume
	held    time.Duration // in earlier pauses
	since   time.Time     // of this pause
}

func newClock() *clock { return &clock{changed: make(chan struct{})} }

func (c *clock) set(paused bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.paused == paused {
		return
	}
	if paused {
		c.since = time.Now()
	} else {
		c.held += time.Since(c.since)
	}
	c.paused = paused
	close(c.changed)
	c.changed = make(chan struct{})
}

func (c *clock) state() (paused bool, changed <-chan struct{}) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.paused, c.changed
}

// heldUntilNow is the time spent paused.
func (c *clock) heldUntilNow() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.paused {
		return c.held + time.Since(c.since)
	}
	return c.held
}

// gate waits while the clock stands still.
func (c *clock) gate(ctx context.Context) error {
	for {
		paused, changed := c.state()
		if !paused {
			return ctx.Err()
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// sleep waits until d has passed on this clock.
func (c *clock) sleep(ctx context.Context, d time.Duration) error {
	for d > 0 {
		if err := c.gate(ctx); err != nil {
			return err
		}
		_, changed := c.state()
		began := time.Now()
		t := time.NewTimer(d)
		select {
		case <-t.C:
			d = 0
		case <-changed:
			d -= time.Since(began)
		case <-ctx.Done():
			t.Stop()
			return ctx.Err()
		}
		t.Stop()
	}
	return c.gate(ctx)
}

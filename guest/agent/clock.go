package agent

import (
	"sync"
	"time"
)

// hardExtra is what the wall of a time limit is beyond twice the limit: that
// one does not stand still.
const hardExtra = 60 * time.Second

// clock lets a command's time limit fire. It stands still while held.
type clock struct {
	fire func()

	mu    sync.Mutex
	left  time.Duration // of the limit, at since if it runs; 0: none
	since time.Time     // when it last began to run, or to be held
	on    bool
	held  bool
	total time.Duration // held before
	soft  *time.Timer
	hard  *time.Timer
}

func (c *clock) start(limit time.Duration, held bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.left, c.on, c.held, c.since = limit, true, held, time.Now()
	if limit > 0 {
		c.hard = time.AfterFunc(2*limit+hardExtra, c.expire)
		c.armLocked()
	}
}

func (c *clock) armLocked() {
	if c.soft != nil {
		c.soft.Stop()
	}
	if c.on && !c.held && c.hard != nil {
		c.soft = time.AfterFunc(max(c.left, 0), c.expire)
	}
}

func (c *clock) expire() {
	c.mu.Lock()
	on := c.on
	c.mu.Unlock()
	if on {
		c.fire()
	}
}

func (c *clock) hold(held bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.on || held == c.held {
		return
	}
	now := time.Now()
	if held {
		c.left -= now.Sub(c.since)
	} else {
		c.total += stood(c.since, now)
	}
	c.held, c.since = held, now
	c.armLocked()
}

// stood is how long something was held. A machine that was stopped meanwhile has not counted that, but was told
// what time it is now.
func stood(since, now time.Time) time.Duration {
	return max(now.Sub(since), now.Round(0).Sub(since.Round(0)))
}

// stop ends the clock and returns how long it was held.
func (c *clock) stop() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.on && c.held {
		c.total += stood(c.since, time.Now())
	}
	c.on = false
	for _, t := range []*time.Timer{c.soft, c.hard} {
		if t != nil {
			t.Stop()
		}
	}
	return c.total
}

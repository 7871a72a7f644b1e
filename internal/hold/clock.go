package hold

import (
	"sync"
	"time"
)

// clock lets a command's deadline fire. It stops while the sandbox is held; a
// hard wall of twice the time and a minute does not.
type clock struct {
	fire func()

	mu      sync.Mutex
	limit   time.Duration // 0: none
	left    time.Duration
	since   time.Time // when it last began to run, or to be held
	running bool
	held    bool
	total   time.Duration // held
	soft    *time.Timer
	hard    *time.Timer
}

const hardExtra = 60 * time.Second

func newClock(limit time.Duration, fire func()) *clock {
	return &clock{fire: fire, limit: limit, left: limit}
}

func (c *clock) start(held bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.running, c.held, c.since = true, held, time.Now()
	if c.limit <= 0 {
		return
	}
	c.hard = time.AfterFunc(2*c.limit+hardExtra, c.fire)
	if !held {
		c.soft = time.AfterFunc(c.left, c.fire)
	}
}

func (c *clock) hold(held bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.running || held == c.held {
		return
	}
	now := time.Now()
	passed := now.Sub(c.since)
	c.held, c.since = held, now
	if !held {
		c.total += passed
		if c.limit > 0 {
			c.soft = time.AfterFunc(max(c.left, 0), c.fire)
		}
		return
	}
	c.left -= passed
	if c.soft != nil {
		c.soft.Stop()
	}
}

// stop ends the clock and returns how long it was held.
func (c *clock) stop() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.running && c.held {
		c.total += time.Since(c.since)
	}
	c.running = false
	for _, t := range []*time.Timer{c.soft, c.hard} {
		if t != nil {
			t.Stop()
		}
	}
	return c.total
}

package hold

import (
	"sync"
	"time"
)

// clock lets a command's deadline fire. It stops while the sandbox is held; a
// hard wall of twice the time and a minute does not.
type clock struct {
	fire func() // called with mu held

	mu      sync.Mutex
	limit   time.Duration // 0: none
	left    time.Duration // at since, if it ran
	since   time.Time     // when it last began to run, or to be held
	hardAt  time.Time
	running bool
	held    bool
	paused  bool          // fires nothing, but time goes on
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
	c.hardAt = c.since.Add(2*c.limit + hardExtra)
	c.armLocked()
}

func (c *clock) armLocked() {
	c.disarmLocked()
	if c.limit <= 0 || !c.running || c.paused {
		return
	}
	c.hard = time.AfterFunc(max(time.Until(c.hardAt), 0), c.expire)
	if !c.held {
		c.soft = time.AfterFunc(max(c.left-time.Since(c.since), 0), c.expire)
	}
}

func (c *clock) disarmLocked() {
	for _, t := range []*time.Timer{c.soft, c.hard} {
		if t != nil {
			t.Stop()
		}
	}
}

func (c *clock) expire() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.running && !c.paused {
		c.fire()
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
	if held {
		c.left -= passed
	} else {
		c.total += passed
	}
	c.armLocked()
}

// stop ends the clock and returns how long it was held.
func (c *clock) stop() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.running && c.held {
		c.total += time.Since(c.since)
	}
	c.running = false
	c.disarmLocked()
	return c.total
}

// pause returns when nothing fires any more, until resume.
func (c *clock) pause() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.paused = true
	c.disarmLocked()
}

func (c *clock) resume() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.paused = false
	c.armLocked()
}

// clockState is a clock on its way to the next program.
type clockState struct {
	Running, Held bool
	Left          time.Duration // of the limit, Age ago
	Age           time.Duration // since it last began to run, or to be held
	Hard          time.Duration // from now
	Total         time.Duration // held before Age
}

func (c *clock) state() clockState {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := clockState{Running: c.running, Held: c.held, Left: c.left, Total: c.total}
	if c.running {
		s.Age, s.Hard = time.Since(c.since), time.Until(c.hardAt)
	}
	return s
}

// restore makes the clock, which must be new, go on where another one was
// that long ago.
func (c *clock) restore(s clockState, ago time.Duration) {
	now := time.Now()
	c.running, c.held, c.left, c.total, c.paused = s.Running, s.Held, s.Left, s.Total, true
	c.since, c.hardAt = now.Add(-s.Age-ago), now.Add(s.Hard-ago)
}

package hold

import (
	"context"
	"sync"
)

// crowd counts what goes on, so that one can wait until nothing does.
type crowd struct {
	mu   sync.Mutex
	n    int
	shut chan struct{} // not nil while nobody is let in; closed when they are again
	idle chan struct{} // not nil while somebody waits; closed when n is 0
}

// enter counts one more, once the crowd is not shut.
func (c *crowd) enter() {
	for {
		c.mu.Lock()
		shut := c.shut
		if shut == nil {
			c.n++
		}
		c.mu.Unlock()
		if shut == nil {
			return
		}
		<-shut
	}
}

func (c *crowd) leave() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.n--; c.n == 0 && c.idle != nil {
		close(c.idle)
		c.idle = nil
	}
}

func (c *crowd) close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.shut == nil {
		c.shut = make(chan struct{})
	}
}

func (c *crowd) open() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.shut != nil {
		close(c.shut)
		c.shut = nil
	}
}

// empty waits until nothing goes on.
func (c *crowd) empty(ctx context.Context) error {
	for {
		c.mu.Lock()
		if c.n == 0 {
			c.mu.Unlock()
			return nil
		}
		if c.idle == nil {
			c.idle = make(chan struct{})
		}
		idle := c.idle
		c.mu.Unlock()
		select {
		case <-idle:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// Package crew is a set of goroutines, or of others who are at work, that their
// owner waits for when it closes. After Close nobody joins, so Wait ends.
package crew

import "sync"

// Crew is ready to use as it is.
type Crew struct {
	mu     sync.Mutex
	closed bool
	wg     sync.WaitGroup
}

// Join makes Wait wait for a Leave; false: it is too late, and nothing is to
// be left.
func (c *Crew) Join() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.closed {
		c.wg.Add(1)
	}
	return !c.closed
}

// Leave ends what a Join that was true began.
func (c *Crew) Leave() { c.wg.Done() }

// Go runs fn in a goroutine; false: it is too late, and fn is not run.
func (c *Crew) Go(fn func()) bool {
	if !c.Join() {
		return false
	}
	go func() {
		defer c.Leave()
		fn()
	}()
	return true
}

// Close lets nobody join any more. It does not wait.
func (c *Crew) Close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
}

// Wait returns when all have left; call Close before.
func (c *Crew) Wait() { c.wg.Wait() }

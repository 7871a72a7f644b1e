package nodeapi

import (
	"sync"

	"github.com/opendsec/dsec"
)

// conns counts what is open to the ports of each sandbox: one that serves the
// whole world must not use up the descriptors of the agent.
type conns struct {
	mu   sync.Mutex
	open map[dsec.SandboxID]int // more than 0
}

// take makes room for one more connection, until the returned func is called.
func (c *conns) take(id dsec.SandboxID, most int) (release func(), err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.open[id] >= most {
		return nil, dsec.Errorf(dsec.ResourceExhausted, "dial port", string(id), "%d connections to its ports are open, the most there may be", most)
	}
	if c.open == nil {
		c.open = map[dsec.SandboxID]int{}
	}
	c.open[id]++
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.open[id]--; c.open[id] == 0 {
			delete(c.open, id)
		}
	}, nil
}

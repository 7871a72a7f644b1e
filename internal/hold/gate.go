package hold

import (
	"context"
	"sync"
)

// gate counts what goes on behind it, so that one can shut it and wait until
// nothing does.
type gate struct {
	mu   sync.Mutex
	n    int
	shut chan struct{} // not nil while nobody is let in; closed when they are again
	idle chan struct{} // not nil while somebody waits; closed when n is 0
}

// enter counts one more, once the gate is not shut.
func (g *gate) enter() {
	for {
		g.mu.Lock()
		shut := g.shut
		if shut == nil {
			g.n++
		}
		g.mu.Unlock()
		if shut == nil {
			return
		}
		<-shut
	}
}

func (g *gate) leave() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.n--; g.n == 0 && g.idle != nil {
		close(g.idle)
		g.idle = nil
	}
}

func (g *gate) close() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.shut == nil {
		g.shut = make(chan struct{})
	}
}

func (g *gate) open() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.shut != nil {
		close(g.shut)
		g.shut = nil
	}
}

// empty waits until nothing goes on.
func (g *gate) empty(ctx context.Context) error {
	for {
		g.mu.Lock()
		if g.n == 0 {
			g.mu.Unlock()
			return nil
		}
		if g.idle == nil {
			g.idle = make(chan struct{})
		}
		idle := g.idle
		g.mu.Unlock()
		select {
		case <-idle:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

package tier

import (
	"context"
	"slices"
	"sync"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/runtime"
)

// Ends are the ends of sandboxes that are to be told to whoever receives from C. They wait
// as long as it takes.
type Ends struct {
	out  chan runtime.Exit
	wake chan struct{} // has an element when unsent changed

	mu     sync.Mutex
	unsent []*runtime.Exit
}

// NewEnds begins without any. Send has to run.
func NewEnds() *Ends {
	return &Ends{out: make(chan runtime.Exit), wake: make(chan struct{}, 1)}
}

// C is where they are told.
func (e *Ends) C() <-chan runtime.Exit { return e.out }

// Send tells them until its context ends.
func (e *Ends) Send(ctx context.Context) {
	for {
		next, to := e.first()
		select {
		case to <- *next:
			e.drop(func(x *runtime.Exit) bool { return x == next })
		case <-e.wake: // it grew, or what is first was acknowledged
		case <-ctx.Done():
			return
		}
	}
}

// first is what is to be sent, and where: to nil, which is never ready, if there is nothing.
func (e *Ends) first() (*runtime.Exit, chan<- runtime.Exit) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if len(e.unsent) == 0 {
		return &runtime.Exit{}, nil
	}
	return e.unsent[0], e.out
}

func (e *Ends) drop(which func(*runtime.Exit) bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.unsent = slices.DeleteFunc(e.unsent, which)
}

// Report has an end told.
func (e *Ends) Report(x runtime.Exit) {
	e.mu.Lock()
	e.unsent = append(e.unsent, &x)
	e.mu.Unlock()
	e.kick()
}

// Acknowledge drops the end of a sandbox that was not received yet.
func (e *Ends) Acknowledge(id dsec.SandboxID) {
	e.drop(func(x *runtime.Exit) bool { return x.ID == id })
	e.kick()
}

func (e *Ends) kick() {
	select {
	case e.wake <- struct{}{}:
	default:
	}
}

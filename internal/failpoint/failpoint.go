// Package failpoint names places where a test can make the program fail.
//
// Code calls Hit at a place worth breaking. Nothing is armed in production:
// then Hit is one atomic load and returns nil. A test records a run to learn
// the names on its way, then arms each in turn. Names are global to the
// process; tests that arm the same name must not run at the same time.
package failpoint

import (
	"context"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/opendsec/dsec"
)

// Action is what happens at an armed failpoint. A nil error lets the program
// go on.
type Action func(ctx context.Context, name string) error

var (
	active atomic.Int32 // armed names plus recorders

	mu        sync.Mutex
	armed     = map[string]*arming{}
	recorders = map[*recorder]struct{}{}
)

type arming struct{ act Action }

type recorder struct{ names []string }

// Active reports whether anything is armed or recorded, so that a caller can
// spare itself making a name.
func Active() bool { return active.Load() != 0 }

// Hit runs the action armed at name, if any.
func Hit(ctx context.Context, name string) error {
	if active.Load() == 0 {
		return nil
	}
	return hit(ctx, name)
}

func hit(ctx context.Context, name string) error {
	mu.Lock()
	for r := range recorders {
		if !slices.Contains(r.names, name) {
			r.names = append(r.names, name)
		}
	}
	a := armed[name]
	mu.Unlock()
	if a == nil {
		return nil
	}
	return a.act(ctx, name)
}

// Arm sets what happens at name until disarm is called. It replaces what was
// armed there before.
func Arm(name string, a Action) (disarm func()) {
	mine := &arming{act: a}
	mu.Lock()
	defer mu.Unlock()
	if armed[name] == nil {
		active.Add(1)
	}
	armed[name] = mine
	return func() {
		mu.Lock()
		defer mu.Unlock()
		if armed[name] == mine {
			delete(armed, name)
			active.Add(-1)
		}
	}
}

// Record collects the names that are hit, in the order of their first hit,
// until stop is called, which returns them.
func Record() (stop func() []string) {
	r := &recorder{}
	mu.Lock()
	recorders[r] = struct{}{}
	mu.Unlock()
	active.Add(1)
	return func() []string {
		mu.Lock()
		defer mu.Unlock()
		if _, ok := recorders[r]; ok {
			delete(recorders, r)
			active.Add(-1)
		}
		return r.names
	}
}

// Once fails the first time with err, with an Internal error that names the
// failpoint if err is nil.
func Once(err error) Action { return Times(1, err) }

// Times fails the first n times.
func Times(n int, err error) Action {
	var left atomic.Int64
	left.Store(int64(n))
	return func(_ context.Context, name string) error {
		if left.Add(-1) < 0 {
			return nil
		}
		if err == nil {
			return dsec.Errorf(dsec.Internal, "failpoint", name, "armed to fail")
		}
		return err
	}
}

// Block waits until release is closed, or the context ends. It sends name on
// entered first, unless that is nil.
func Block(entered chan<- string, release <-chan struct{}) Action {
	return func(ctx context.Context, name string) error {
		if entered != nil {
			select {
			case entered <- name:
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		select {
		case <-release:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// Call runs fn, for example to cancel a context at a certain place.
func Call(fn func()) Action {
	return func(context.Context, string) error {
		fn()
		return nil
	}
}

// Kill ends this process with SIGKILL, as a crash would.
func Kill() Action {
	return func(context.Context, string) error {
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL) // cannot fail for oneself
		select {}
	}
}

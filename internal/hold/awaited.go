package hold

import (
	"context"
	"sync"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/process"
)

// awaited is the end of a command as far as this client knows it. The hold
// reports every end as an event, so waiting for one asks nothing.
type awaited struct {
	done chan struct{} // closed when res or err is set

	users int // starts and searches that rely on it; guarded by ends.mu
	res   ExecResult
	kept  [][]byte // all output, if there was little
	err   error    // the sandbox was removed before the end was known
}

type execName struct{ sandbox, exec string }

// ends are the commands this client started or found and has not released.
type ends struct {
	mu sync.Mutex
	m  map[string]map[string]*awaited // by sandbox, by command
}

// expect must come before the request whose command is meant, so that no end
// is missed; drop undoes it when there is no such command.
func (e *ends) expect(n execName) *awaited {
	e.mu.Lock()
	defer e.mu.Unlock()
	of := e.m[n.sandbox]
	if of == nil {
		of = map[string]*awaited{}
		e.m[n.sandbox] = of
	}
	a := of[n.exec]
	if a == nil {
		a = &awaited{done: make(chan struct{})}
		of[n.exec] = a
	}
	a.users++
	return a
}

func (e *ends) drop(n execName, a *awaited) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if a.users--; a.users == 0 {
		e.deleteLocked(n, a)
	}
}

func (e *ends) deleteLocked(n execName, a *awaited) {
	of := e.m[n.sandbox]
	if of[n.exec] != a {
		return
	}
	if delete(of, n.exec); len(of) == 0 {
		delete(e.m, n.sandbox)
	}
}

// release forgets a command whose end is known; false if it is not.
func (e *ends) release(n execName, a *awaited) bool {
	if !a.isDone() {
		return false
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.deleteLocked(n, a)
	return true
}

// ended records an end; the first report counts.
func (e *ends) ended(n execName, res ExecResult, kept [][]byte) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if a := e.m[n.sandbox][n.exec]; a != nil && !a.isDone() {
		a.res, a.kept = res, kept
		close(a.done)
	}
}

// removed says that a sandbox is forgotten, and every command of it.
func (e *ends) removed(sandbox string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for exec, a := range e.m[sandbox] {
		if !a.isDone() {
			a.err = dsec.E(dsec.NotFound, "find exec", dsec.Quote(exec), nil)
			close(a.done)
		}
	}
	delete(e.m, sandbox)
}

func (a *awaited) isDone() bool {
	select {
	case <-a.done:
		return true
	default:
		return false
	}
}

// wait returns the end of a command when it comes.
func (c *Client) wait(ctx context.Context, a *awaited) (process.Result, error) {
	if a.isDone() {
		return a.res, a.err
	}
	select {
	case <-a.done:
		return a.res, a.err
	case <-ctx.Done():
		return process.Result{}, dsec.E(dsec.ClassOf(ctx.Err()), "wait for exec", "", ctx.Err())
	case <-c.done:
		return process.Result{}, dsec.E(dsec.Unavailable, "wait for exec", "", errHoldGone)
	}
}

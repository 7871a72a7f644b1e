package tier

import (
	"context"
	"maps"
	"slices"
	"sync"

	"github.com/opendsec/dsec"
)

// Sandbox is a pointer to a type that embeds Box.
type Sandbox interface {
	comparable
	box() *Box
}

// Table has the sandboxes of a runtime.
type Table[S Sandbox] struct {
	fresh func(dsec.SandboxID) S

	mu  sync.Mutex
	all map[dsec.SandboxID]S
}

// NewTable is an empty one whose sandboxes are made by fresh.
func NewTable[S Sandbox](fresh func(dsec.SandboxID) S) *Table[S] {
	return &Table[S]{fresh: fresh, all: map[dsec.SandboxID]S{}}
}

// All are the sandboxes that there are, in no order.
func (t *Table[S]) All() []S {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Collect(maps.Values(t.all))
}

// Get returns the sandbox of that id, if there is one.
func (t *Table[S]) Get(id dsec.SandboxID) (sb S, ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	sb, ok = t.all[id]
	return sb, ok
}

// Reserve returns the sandbox of that id, made if there is none.
func (t *Table[S]) Reserve(id dsec.SandboxID) S {
	t.mu.Lock()
	defer t.mu.Unlock()
	sb, ok := t.all[id]
	if !ok {
		sb = t.fresh(id)
		t.all[id] = sb
	}
	return sb
}

// Forget takes a sandbox of which nothing is left out of the table.
func (t *Table[S]) Forget(sb S) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if id := sb.box().ID; t.all[id] == sb {
		delete(t.all, id)
	}
}

// Current reports whether a sandbox was not removed meanwhile.
func (t *Table[S]) Current(sb S) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.all[sb.box().ID] == sb
}

// Find returns a sandbox that exists, or NotFound.
func (t *Table[S]) Find(op string, id dsec.SandboxID) (S, error) {
	sb, ok := t.Get(id)
	if !ok {
		return sb, dsec.Errorf(dsec.NotFound, op, string(id), "no such sandbox")
	}
	return sb, nil
}

// FindInside is Find for calls that reach into a sandbox: one that does not exist is one that
// has ended.
func (t *Table[S]) FindInside(op string, id dsec.SandboxID) (S, error) {
	sb, ok := t.Get(id)
	if !ok {
		return sb, dsec.Errorf(dsec.SandboxGone, op, string(id), "no such sandbox")
	}
	return sb, nil
}

// Acquire finds a sandbox and takes its turn. While the caller waited it may have been
// removed, and made again.
func (t *Table[S]) Acquire(ctx context.Context, op string, id dsec.SandboxID) (S, error) {
	for {
		sb, err := t.Find(op, id)
		if err != nil {
			return sb, err
		}
		if err := sb.box().Enter(ctx, op); err != nil {
			return sb, err
		}
		if t.Current(sb) {
			return sb, nil
		}
		sb.box().Leave()
	}
}

// Live returns a sandbox that runs, or the error that says why it cannot be used.
func (t *Table[S]) Live(op string, id dsec.SandboxID) (S, error) {
	sb, err := t.FindInside(op, id)
	if err != nil {
		return sb, err
	}
	switch sb.box().GetPhase() {
	case Running:
		return sb, nil
	case Ended, Removing, Absent:
		return sb, dsec.Errorf(dsec.SandboxGone, op, string(id), "the sandbox has ended")
	case Stopped:
		return sb, dsec.Errorf(dsec.IllegalState, op, string(id), "the sandbox is stopped")
	}
	return sb, dsec.Errorf(dsec.IllegalState, op, string(id), "the sandbox is being made")
}

package gvisor

import (
	"context"
	"sync"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/files"
	"github.com/opendsec/dsec/internal/cgroup"
	"github.com/opendsec/dsec/runtime"
)

// phase is where a sandbox is as its runtime sees it.
type phase int

const (
	absent   phase = iota // no record: being made, or removed
	making                // created or started, not yet running
	running               //
	ended                 // ended by itself; Stop or Destroy acknowledges
	stopped               // disk kept
	removing              // Destroy is under way
)

// sandbox is one sandbox. turn serialises the calls that change it; mu guards the fields
// and is held for moments only.
type sandbox struct {
	id   dsec.SandboxID
	turn chan struct{} // capacity 1

	hasDisk bool // there is an instance for the files of a stopped one; only with the turn
	saved   bool // nothing was written since the upper layer was; only with the turn

	mu       sync.Mutex
	phase    phase
	paused   bool
	stopping bool // Stop is under way, so ends are no news
	rec      *record
	group    *cgroup.Group
	locale   *string       // nil: not looked for
	exit     *runtime.Exit // set in ended
	early    *runtime.Exit // of a sandbox that ended before it was made
	services map[string]*files.Redialing
}

func newSandbox(id dsec.SandboxID) *sandbox {
	return &sandbox{id: id, turn: make(chan struct{}, 1)}
}

// lock waits for the calls before this one.
func (sb *sandbox) lock(ctx context.Context, op string) error {
	select {
	case sb.turn <- struct{}{}:
		return nil
	case <-ctx.Done():
		return dsec.E(dsec.ClassOf(ctx.Err()), op, string(sb.id), context.Cause(ctx))
	}
}

func (sb *sandbox) unlock() { <-sb.turn }

func (sb *sandbox) setPhase(p phase) {
	sb.mu.Lock()
	defer sb.mu.Unlock()
	sb.phase = p
}

func (sb *sandbox) beginMaking() {
	sb.mu.Lock()
	defer sb.mu.Unlock()
	sb.phase, sb.early, sb.stopping = making, nil, false
}

func (sb *sandbox) getPhase() phase {
	sb.mu.Lock()
	defer sb.mu.Unlock()
	return sb.phase
}

func (sb *sandbox) isPaused() bool {
	sb.mu.Lock()
	defer sb.mu.Unlock()
	return sb.paused
}

func (sb *sandbox) record() *record {
	sb.mu.Lock()
	defer sb.mu.Unlock()
	return sb.rec
}

// gone reports whether the sandbox is removed, or about to be.
func (sb *sandbox) gone() bool {
	p := sb.getPhase()
	return p == removing || p == absent
}

func (sb *sandbox) status() (runtime.Status, bool) {
	sb.mu.Lock()
	defer sb.mu.Unlock()
	return runtime.Status{ID: sb.id, Running: sb.phase == running, Paused: sb.phase == running && sb.paused}, sb.phase != absent
}

// reserve returns the sandbox of that id, made if there is none.
func (r *Runtime) reserve(id dsec.SandboxID) *sandbox {
	r.mu.Lock()
	defer r.mu.Unlock()
	sb := r.sandboxes[id]
	if sb == nil {
		sb = newSandbox(id)
		r.sandboxes[id] = sb
	}
	return sb
}

// forget takes a sandbox of which nothing is left out of the map.
func (r *Runtime) forget(sb *sandbox) {
	r.acknowledge(sb.id)
	sb.closeServices()
	sb.mu.Lock()
	sb.phase, sb.rec, sb.group = absent, nil, nil
	sb.mu.Unlock()
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.sandboxes[sb.id] == sb {
		delete(r.sandboxes, sb.id)
	}
}

// find returns a sandbox that exists, or NotFound.
func (r *Runtime) find(op string, id dsec.SandboxID) (*sandbox, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	sb := r.sandboxes[id]
	if sb == nil {
		return nil, dsec.Errorf(dsec.NotFound, op, string(id), "no such sandbox")
	}
	return sb, nil
}

// findInside is find for calls that reach into a sandbox: one that does not exist is one
// that has ended.
func (r *Runtime) findInside(op string, id dsec.SandboxID) (*sandbox, error) {
	sb, err := r.find(op, id)
	if err != nil {
		return nil, dsec.E(dsec.SandboxGone, op, string(id), err.(*dsec.Error).Err)
	}
	return sb, nil
}

// acquire finds a sandbox and takes its turn. While the caller waited it may have been
// removed, and made again.
func (r *Runtime) acquire(ctx context.Context, op string, id dsec.SandboxID) (*sandbox, error) {
	for {
		sb, err := r.find(op, id)
		if err != nil {
			return nil, err
		}
		if err := sb.lock(ctx, op); err != nil {
			return nil, err
		}
		if r.current(sb) {
			return sb, nil
		}
		sb.unlock()
	}
}

func (r *Runtime) current(sb *sandbox) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.sandboxes[sb.id] == sb
}

// live returns a sandbox that runs, or the error that says why it cannot be used.
func (r *Runtime) live(op string, id dsec.SandboxID) (*sandbox, error) {
	sb, err := r.findInside(op, id)
	if err != nil {
		return nil, err
	}
	switch sb.getPhase() {
	case running:
		return sb, nil
	case ended, removing, absent:
		return nil, dsec.Errorf(dsec.SandboxGone, op, string(id), "the sandbox has ended")
	case stopped:
		return nil, dsec.Errorf(dsec.IllegalState, op, string(id), "the sandbox is stopped")
	}
	return nil, dsec.Errorf(dsec.IllegalState, op, string(id), "the sandbox is being made")
}

// wrap names the call and the sandbox in the error of a step; nil stays nil.
func wrap(op string, id dsec.SandboxID, err error) error {
	if err == nil {
		return nil
	}
	return dsec.E(dsec.ClassOf(err), op, string(id), err)
}

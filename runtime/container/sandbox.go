package container

import (
	"context"
	"os"
	"sync"

	"golang.org/x/sync/semaphore"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/files"
	"github.com/opendsec/dsec/internal/cgroup"
	"github.com/opendsec/dsec/runtime"
)

// phase is where a sandbox is as its runtime sees it; the states of package
// dsec are the node's.
type phase int

const (
	absent   phase = iota // no record: being made, or removed
	making                // created or started, not yet running
	running               //
	ended                 // ended by itself; Stop or Destroy acknowledges
	stopped               // disk kept
	removing              // Destroy is under way
)

// sandbox is one sandbox. turn serialises the calls that change it; mu guards
// the fields and is held for moments only.
type sandbox struct {
	id   dsec.SandboxID
	turn chan struct{} // capacity 1

	// starts has a share for each command that is being started; a move between phases
	// takes all.
	starts *semaphore.Weighted

	hasDisk bool // there is a disk shell; only with the turn

	mu     sync.Mutex
	phase  phase
	paused bool
	moving bool // from a phase to another: nothing is started
	// stopping: Stop is under way, so ends are no news.
	stopping bool
	rec      *record
	group    *cgroup.Group
	root     *os.File // clone of the root mount to read accounts from; nil after an adoption
	users    userCache
	locale   string
	exit     *runtime.Exit // set in ended
	early    *runtime.Exit // of a sandbox that ended before it was made
	// services are the open file services by user.
	services map[string]*files.Redialing
}

func newSandbox(id dsec.SandboxID) *sandbox {
	return &sandbox{id: id, turn: make(chan struct{}, 1), starts: semaphore.NewWeighted(manyStarts)}
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
	sb.phase, sb.early, sb.moving = making, nil, false
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

func (sb *sandbox) status() (runtime.Status, bool) {
	sb.mu.Lock()
	defer sb.mu.Unlock()
	return runtime.Status{ID: sb.id, Running: sb.phase == running, Paused: sb.phase == running && sb.paused}, sb.phase != absent
}

func (sb *sandbox) closeRoot() {
	sb.mu.Lock()
	defer sb.mu.Unlock()
	if sb.root != nil {
		sb.root.Close()
		sb.root = nil
	}
	sb.users = userCache{}
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

// findInside is find for calls that reach into a sandbox: one that does not
// exist is one that has ended.
func (r *Runtime) findInside(op string, id dsec.SandboxID) (*sandbox, error) {
	sb, err := r.find(op, id)
	if err != nil {
		return nil, dsec.E(dsec.SandboxGone, op, string(id), err.(*dsec.Error).Err)
	}
	return sb, nil
}

// acquire finds a sandbox and takes its turn. While the caller waited it may
// have been removed, and made again.
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

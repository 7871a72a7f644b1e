package fullvm

import (
	"context"
	"strings"
	"sync"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/guest"
	"github.com/opendsec/dsec/internal/cgroup"
	"github.com/opendsec/dsec/runtime/microvm/vmm"
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

// sandbox is one sandbox. turn serialises the calls that change it; mu guards the
// fields and is held for moments only.
type sandbox struct {
	id   dsec.SandboxID
	turn chan struct{} // capacity 1

	mu       sync.Mutex
	phase    phase
	stopping bool // ends are no news
	rec      *record
	group    *cgroup.Group
	vm       vmm.Desk
	said     []byte             // by the machines before, to their consoles
	hangUp   context.CancelFunc // ends the session with the agent for good
	talking  chan struct{}      // closed when that has ended
	client   *guest.Client      // of the session there is; nil: none
	changed  chan struct{}      // closed, and another one, when client changed
}

func newSandbox(id dsec.SandboxID) *sandbox {
	return &sandbox{id: id, turn: make(chan struct{}, 1), changed: make(chan struct{})}
}

// machinePrefix is of the names of machines, which those of other tiers do not have.
const machinePrefix = "f."

func (sb *sandbox) machine() string { return machinePrefix + string(sb.id) }

// idOf is the sandbox of a machine.
func idOf(machine string) string { return strings.TrimPrefix(machine, machinePrefix) }

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

func (sb *sandbox) getPhase() phase {
	sb.mu.Lock()
	defer sb.mu.Unlock()
	return sb.phase
}

func (sb *sandbox) record() *record {
	sb.mu.Lock()
	defer sb.mu.Unlock()
	return sb.rec
}

func (sb *sandbox) machineNow() vmm.Desk {
	sb.mu.Lock()
	defer sb.mu.Unlock()
	return sb.vm
}

// setClient changes who answers for the guest.
func (sb *sandbox) setClient(c *guest.Client) {
	sb.mu.Lock()
	defer sb.mu.Unlock()
	sb.client = c
	close(sb.changed)
	sb.changed = make(chan struct{})
}

// letGo ends the session with the guest, which goes on.
func (sb *sandbox) letGo() {
	sb.mu.Lock()
	hangUp, talking := sb.hangUp, sb.talking
	sb.mu.Unlock()
	if hangUp != nil {
		hangUp()
		<-talking
	}
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

// current reports whether sb is still the sandbox of its id.
func (r *Runtime) current(sb *sandbox) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.sandboxes[sb.id] == sb
}

// forget takes a sandbox of which nothing is left out of the map.
func (r *Runtime) forget(sb *sandbox) {
	r.acknowledge(sb.id)
	sb.mu.Lock()
	sb.phase, sb.rec, sb.group, sb.vm = absent, nil, nil, nil
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

// acquire takes the turn of a sandbox that exists.
func (r *Runtime) acquire(ctx context.Context, op string, id dsec.SandboxID) (*sandbox, error) {
	sb, err := r.find(op, id)
	if err != nil {
		return nil, err
	}
	if err := sb.lock(ctx, op); err != nil {
		return nil, err
	}
	if !r.current(sb) || sb.getPhase() == absent {
		sb.unlock()
		return nil, dsec.Errorf(dsec.NotFound, op, string(id), "no such sandbox")
	}
	return sb, nil
}

// live is the machine of a sandbox that runs, paused or not.
func (r *Runtime) live(op string, id dsec.SandboxID) (*sandbox, vmm.Desk, error) {
	sb, err := r.find(op, id)
	if err != nil {
		return nil, nil, dsec.Errorf(dsec.SandboxGone, op, string(id), "no such sandbox")
	}
	sb.mu.Lock()
	defer sb.mu.Unlock()
	switch {
	case sb.phase == ended || sb.phase == removing || sb.phase == absent:
		return nil, nil, dsec.Errorf(dsec.SandboxGone, op, string(id), "it has ended")
	case sb.phase != running || sb.vm == nil:
		return nil, nil, dsec.Errorf(dsec.IllegalState, op, string(id), "it does not run")
	}
	return sb, sb.vm, nil
}

// wrap names the call and the sandbox in an error; nil stays nil.
func wrap(op string, id dsec.SandboxID, err error) error {
	if err == nil {
		return nil
	}
	return dsec.E(dsec.ClassOf(err), op, string(id), err)
}

package fullvm

import (
	"context"
	"strings"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/guest"
	"github.com/opendsec/dsec/internal/cgroup"
	"github.com/opendsec/dsec/runtime"
	"github.com/opendsec/dsec/runtime/microvm/vmm"
	"github.com/opendsec/dsec/runtime/tier"
)

// sandbox is one sandbox. Its turn and its Mu are as in tier.Box.
type sandbox struct {
	tier.Box

	rec     *record
	group   *cgroup.Group
	vm      vmm.Desk
	said    []byte             // by the machines before, to their consoles
	hangUp  context.CancelFunc // ends the session with the agent for good
	talking chan struct{}      // closed when that has ended
	client  *guest.Client      // of the session there is; nil: none
	changed chan struct{}      // closed, and another one, when client changed
	early   *runtime.Exit      // it ended while it was being made
	peak    int64              // of the memory that was seen to be used

	services tier.Services
}

func newSandbox(id dsec.SandboxID) *sandbox {
	sb := &sandbox{changed: make(chan struct{})}
	sb.Init(id)
	return sb
}

// machinePrefix is of the names of machines, which those of other tiers do not have.
const machinePrefix = "f."

func (sb *sandbox) machine() string { return machinePrefix + string(sb.ID) }

// idOf is the sandbox of a machine.
func idOf(machine string) string { return strings.TrimPrefix(machine, machinePrefix) }

func (sb *sandbox) record() *record {
	sb.Mu.Lock()
	defer sb.Mu.Unlock()
	return sb.rec
}

func (sb *sandbox) machineNow() vmm.Desk {
	sb.Mu.Lock()
	defer sb.Mu.Unlock()
	return sb.vm
}

// setClient changes who answers for the guest.
func (sb *sandbox) setClient(c *guest.Client) {
	sb.Mu.Lock()
	defer sb.Mu.Unlock()
	sb.client = c
	close(sb.changed)
	sb.changed = make(chan struct{})
}

// letGo ends the session with the guest, which goes on.
func (sb *sandbox) letGo() {
	sb.Mu.Lock()
	hangUp, talking := sb.hangUp, sb.talking
	sb.Mu.Unlock()
	if hangUp != nil {
		hangUp()
		<-talking
	}
}

// forget takes a sandbox of which nothing is left out of the map.
func (r *Runtime) forget(sb *sandbox) {
	r.ends.Acknowledge(sb.ID)
	sb.Mu.Lock()
	sb.Phase, sb.rec, sb.group, sb.vm = tier.Absent, nil, nil, nil
	sb.Mu.Unlock()
	r.boxes.Forget(sb)
}

// acquire takes the turn of a sandbox that exists.
func (r *Runtime) acquire(ctx context.Context, op string, id dsec.SandboxID) (*sandbox, error) {
	sb, err := r.boxes.Find(op, id)
	if err != nil {
		return nil, err
	}
	if err := sb.Enter(ctx, op); err != nil {
		return nil, err
	}
	if !r.boxes.Current(sb) || sb.GetPhase() == tier.Absent {
		sb.Leave()
		return nil, dsec.Errorf(dsec.NotFound, op, string(id), "no such sandbox")
	}
	return sb, nil
}

// live is the machine of a sandbox that runs, paused or not.
func (r *Runtime) live(op string, id dsec.SandboxID) (*sandbox, vmm.Desk, error) {
	sb, err := r.boxes.Find(op, id)
	if err != nil {
		return nil, nil, dsec.Errorf(dsec.SandboxGone, op, string(id), "no such sandbox")
	}
	sb.Mu.Lock()
	defer sb.Mu.Unlock()
	switch {
	case sb.Phase == tier.Ended || sb.Phase == tier.Removing || sb.Phase == tier.Absent:
		return nil, nil, dsec.Errorf(dsec.SandboxGone, op, string(id), "it has ended")
	case sb.Phase != tier.Running || sb.vm == nil:
		return nil, nil, dsec.Errorf(dsec.IllegalState, op, string(id), "it does not run")
	}
	return sb, sb.vm, nil
}

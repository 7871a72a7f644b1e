package microvm

import (
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

	talking chan struct{} // held by who begins a session; capacity 1

	// suspended is not nil while its machine is on disk; closed when it is back, or given up.
	suspended chan struct{}
	rec       *record
	group     *cgroup.Group
	machine   vmm.VM        // nil: none
	client    *guest.Client // nil: no session yet; may have ended
	exit      *runtime.Exit // set in ended
	early     *runtime.Exit // of a sandbox that ended before it was made
	disk      *diskMachine  // that serves the files of one that does not run
	services  tier.Services
}

func newSandbox(id dsec.SandboxID) *sandbox {
	sb := &sandbox{talking: make(chan struct{}, 1)}
	sb.Init(id)
	return sb
}

func (sb *sandbox) beginMaking() {
	sb.Mu.Lock()
	defer sb.Mu.Unlock()
	sb.Phase, sb.early, sb.Stopping, sb.Paused = tier.Making, nil, false, false
}

func (sb *sandbox) record() *record {
	sb.Mu.Lock()
	defer sb.Mu.Unlock()
	return sb.rec
}

// forget takes a sandbox of which nothing is left out of the map.
func (r *Runtime) forget(sb *sandbox) {
	r.ends.Acknowledge(sb.ID)
	sb.services.Close()
	sb.Mu.Lock()
	sb.Phase, sb.rec, sb.group = tier.Absent, nil, nil
	sb.giveUpLocked()
	sb.Mu.Unlock()
	r.boxes.Forget(sb)
}

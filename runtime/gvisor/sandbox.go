package gvisor

import (
	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/cgroup"
	"github.com/opendsec/dsec/runtime"
	"github.com/opendsec/dsec/runtime/tier"
)

// sandbox is one sandbox. Its turn and its Mu are as in tier.Box.
type sandbox struct {
	tier.Box

	hasDisk bool // there is an instance for the files of a stopped one; only with the turn
	saved   bool // nothing was written since the upper layer was; only with the turn

	rec      *record
	group    *cgroup.Group
	locale   *string       // nil: not looked for
	exit     *runtime.Exit // set in ended
	early    *runtime.Exit // of a sandbox that ended before it was made
	services tier.Services
}

func newSandbox(id dsec.SandboxID) *sandbox {
	sb := &sandbox{}
	sb.Init(id)
	return sb
}

func (sb *sandbox) beginMaking() {
	sb.Mu.Lock()
	defer sb.Mu.Unlock()
	sb.Phase, sb.early, sb.Stopping = tier.Making, nil, false
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
	sb.Mu.Unlock()
	r.boxes.Forget(sb)
}

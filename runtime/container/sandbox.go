package container

import (
	"os"

	"golang.org/x/sync/semaphore"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/cgroup"
	"github.com/opendsec/dsec/runtime"
	"github.com/opendsec/dsec/runtime/tier"
)

// sandbox is one sandbox. Its turn and its Mu are as in tier.Box.
type sandbox struct {
	tier.Box

	// starts has a share for each command that is being started; a move between phases
	// takes all.
	starts *semaphore.Weighted

	hasDisk bool // there is a disk shell; only with the turn

	moving   bool // from a phase to another: nothing is started
	rec      *record
	group    *cgroup.Group
	root     *os.File // clone of the root mount to read accounts from; nil after an adoption
	users    userCache
	locale   string
	exit     *runtime.Exit // set in ended
	early    *runtime.Exit // of a sandbox that ended before it was made
	services tier.Services
}

func newSandbox(id dsec.SandboxID) *sandbox {
	sb := &sandbox{starts: semaphore.NewWeighted(manyStarts)}
	sb.Init(id)
	return sb
}

func (sb *sandbox) beginMaking() {
	sb.Mu.Lock()
	defer sb.Mu.Unlock()
	sb.Phase, sb.early, sb.moving = tier.Making, nil, false
}

func (sb *sandbox) record() *record {
	sb.Mu.Lock()
	defer sb.Mu.Unlock()
	return sb.rec
}

func (sb *sandbox) closeRoot() {
	sb.Mu.Lock()
	defer sb.Mu.Unlock()
	if sb.root != nil {
		sb.root.Close()
		sb.root = nil
	}
	sb.users = userCache{}
}

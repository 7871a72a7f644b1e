package node

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/runtime"
)

// What damage was done to.
const (
	toSandbox = "sandbox" // its own system
	toService = "service" // a process of the node's
	toNode    = "node"    // what all sandboxes of it share
)

const (
	damageLookBy = 10 * time.Second // looks at the disk of one sandbox are so far apart at least
	damageNamed  = 8                // paths that are told
)

// systemDirs are those without which no command starts. What is gone of them was
// removed by somebody inside.
var systemDirs = []string{"/bin/", "/sbin/", "/lib/", "/lib64/", "/usr/bin/", "/usr/sbin/", "/usr/lib/"}

func repercussion(scope string, by dsec.Inducer, what string) dsec.Event {
	return dsec.Event{Type: dsec.EventRepercussion, Detail: what, Fields: map[string]string{"scope": scope, "by": string(by)}}
}

// tellDamage tells of an end that is damage: everything but an end that its owner,
// or the main process itself, wanted. Ends by a lifetime are not told here.
func (b *box) tellDamage(res *dsec.Result) {
	scope := toSandbox
	switch res.Cause {
	case dsec.CauseCompleted, dsec.CauseCancelled, dsec.CauseAgentError:
		return
	case dsec.CauseInfraNodeLost:
		scope = toService
	}
	e := repercussion(scope, res.InducedBy, strings.Join(res.Evidence, "; "))
	e.Fields["cause"] = string(res.Cause)
	b.emit(e)
}

// suspectDamage looks, when a program could not be found, whether it and others are
// in the layers and were removed, and tells so. It does not wait.
func (b *box) suspectDamage(err error) {
	p, ok := b.rt.(runtime.Packer)
	if !ok || !errors.Is(err, dsec.FileNotFound.Err()) {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	now := b.n.cfg.Clock()
	if now.Sub(b.damageLook) < damageLookBy {
		return
	}
	b.damageLook = now
	b.n.spawn(func() { b.lookForDamage(p) })
}

func (b *box) lookForDamage(p runtime.Packer) {
	c, err := p.Changes(b.n.ctx, b.id, dsec.MaxChanges)
	if err != nil {
		b.n.cfg.Log.Debug("disk not compared", "sandbox", b.id, "err", err)
		return
	}
	gone := 0
	var named []string
	for _, x := range c.List {
		if x.Kind != dsec.Removed || !ofSystem(x.Path) {
			continue
		}
		if gone++; gone <= damageNamed {
			named = append(named, x.Path)
		}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if gone == 0 || gone == b.damaged {
		return
	}
	b.damaged = gone
	more := ""
	if gone > damageNamed {
		more = ", …"
	}
	b.emitLocked(repercussion(toSandbox, dsec.InducedBySelf, fmt.Sprintf("of its system, %d paths were removed: %s%s", gone, strings.Join(named, ", "), more)))
}

// ofSystem says whether a path is in a system directory, or is one, or holds one.
func ofSystem(path string) bool {
	for _, dir := range systemDirs {
		if strings.HasPrefix(path, dir) || strings.HasPrefix(dir, path) {
			return true
		}
	}
	return false
}

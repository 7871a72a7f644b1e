package node

import (
	"context"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/runtime"
)

// lookAtDisks blames live sandboxes on infra_disk when their disks have failed, as
// LayerFailed does for layers: what they read and wrote since may be an error, or
// lost, without any fault of theirs.
func (n *Node) lookAtDisks() {
	for tier, rt := range n.cfg.Runtimes {
		err := diskFailed(n.ctx, rt)
		if err == nil {
			continue
		}
		t := &trouble{cause: dsec.CauseInfraDisk, tier: tier, at: n.cfg.Clock().UTC(), err: err}
		if _, err := n.blameLive(t); err != nil {
			n.cfg.Log.Error("failed disks not written", "tier", tier, "err", err)
		}
	}
}

// notByDisks is the error of what all sandboxes of a tier share, if that may be why a write to one
// of them was refused: then it says nothing of what was written.
func notByDisks(ctx context.Context, rt runtime.Runtime) error {
	err := diskFailed(ctx, rt)
	if w, ok := rt.(runtime.DiskWatcher); ok && err == nil {
		err = w.DiskFull(ctx)
	}
	return err
}

func diskFailed(ctx context.Context, rt runtime.Runtime) error {
	if w, ok := rt.(runtime.DiskWatcher); ok {
		return w.DiskFailed(ctx)
	}
	return nil
}

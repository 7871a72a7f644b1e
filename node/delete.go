package node

import (
	"context"
	"time"

	"go.etcd.io/bbolt"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/failpoint"
)

// Delete implements Service. It confirms or errs, and a sandbox whose removal
// did not succeed is removed later. A creation at work is cancelled.
func (n *Node) Delete(ctx context.Context, id dsec.SandboxID, callID string) (existed bool, err error) {
	answer, err := n.once(ctx, "delete", id, callID, nil, func(t *turn) (string, error) {
		return "true", n.delete(ctx, t.box, dsec.NewResult(dsec.CauseCompleted, "run", dsec.InducedBySelf), t.remember("true"))
	})
	switch dsec.ClassOf(err) {
	case dsec.SandboxGone, dsec.NotFound:
		return false, nil
	}
	return answer == "true" && err == nil, err
}

// delete removes everything but the record. The turn is held.
func (n *Node) delete(ctx context.Context, b *box, res *dsec.Result, extra []op) error {
	var states []dsec.State
	change := func(r *record) { r.Intent = intentDestroy }
	live := b.state() == dsec.Running || b.state() == dsec.Paused
	if live {
		n.lookAtDisks() // before it is said how it ended
		usage := n.sample(ctx, b)
		states = []dsec.State{dsec.Stopping}
		change = func(r *record) { r.Intent, r.Result, r.Usage = intentDestroy, r.verdict(withUsage(res, usage)), usage }
	}
	if live || b.rec.Intent != intentDestroy { // only the turn writes it
		err := b.move(change, nil, states...)
		if dsec.ClassOf(err) == dsec.NoSpace { // deleting is what frees the disk
			b.applied(change, states)
		} else if err != nil {
			return err
		}
	}
	if live {
		n.collect(ctx, b)
		n.ended(b)
	}
	return n.finishDelete(ctx, b, extra)
}

// finishDelete does what the ledger says was begun.
func (n *Node) finishDelete(ctx context.Context, b *box, extra []op) error {
	if err := n.keepFailed(ctx, b); err != nil {
		return b.later(err)
	}
	dctx, done := n.detached(ctx, undoLimit)
	defer done()
	if err := failpoint.Hit(dctx, "node.delete.runtime"); err != nil {
		return b.later(err)
	}
	if err := b.rt.Destroy(dctx, b.id); err != nil {
		return b.later(err)
	}
	if err := n.cfg.Store.Release(dctx, string(b.id)); err != nil {
		return b.later(err)
	}
	b.judge() // with what was found on the disk as it went
	if err := n.bury(b, extra); err != nil {
		return b.later(err)
	}
	return nil
}

// bury moves the record of a sandbox of which nothing is left to those of the
// ended ones. The turn is held.
func (n *Node) bury(b *box, extra []op) error {
	var states []dsec.State
	switch b.state() {
	case dsec.Stopping:
		states = []dsec.State{dsec.Stopped, dsec.Deleted}
	case dsec.Starting:
		states = []dsec.State{dsec.Stopping, dsec.Stopped, dsec.Deleted}
	case dsec.Deleted: // written once before, in vain
	default:
		states = []dsec.State{dsec.Deleted}
	}
	change := func(r *record) { r.Intent, r.Expires = intentNone, time.Time{} }
	b.mu.Lock() // the events come first: they are part of the record, and true by now
	b.appliedLocked(change, states)
	b.mu.Unlock()
	put := func(tx *bbolt.Tx) error { // what it is blamed on until then is in it
		b.mu.Lock()
		defer b.mu.Unlock()
		return putEnded(&b.rec)(tx)
	}
	if err := n.ledger.commit(append([]op{put}, extra...)...); err != nil {
		return err
	}
	n.forget(b)
	return nil
}

package node

import (
	"fmt"
	"time"

	"github.com/opendsec/dsec"
)

const (
	pruneEvery = 10 * time.Minute
	warnMost   = 5 * time.Minute // before an expiry
)

// tick is the node's own goroutine: it expires, retries and writes what
// happened outside a turn.
func (n *Node) tick() {
	t := time.NewTicker(n.cfg.Tick)
	defer t.Stop()
	for {
		select {
		case <-t.C:
			n.sweep()
		case <-n.ctx.Done():
			return
		}
	}
}

// sweep looks at every sandbox once.
func (n *Node) sweep() {
	now := n.cfg.Clock()
	n.lookAtDisks()
	for _, b := range n.all() {
		if todo := b.due(now); todo != nil {
			n.whenFree(b, todo)
		}
	}
	if err := n.flush(); err != nil {
		n.cfg.Log.Error("events not written", "err", err)
	}
	if now.Sub(n.pruned) < pruneEvery {
		return
	}
	n.pruned = now
	if err := n.ledger.prune(now, n.cfg.Records); err != nil {
		n.cfg.Log.Error("old records not removed", "err", err)
	}
	if err := n.forgetAudits(); err != nil {
		n.cfg.Log.Error("old audit logs not removed", "err", err)
	}
}

// whenFree does todo in the turn of b, unless that is taken: then the next sweep
// looks again.
func (n *Node) whenFree(b *box, todo func() error) {
	if !b.tryLock() {
		return
	}
	started := n.own(func() {
		defer b.unlock()
		b.mu.Lock()
		gone := b.gone
		b.mu.Unlock()
		if again := b.due(n.cfg.Clock()); gone || again == nil {
			return
		}
		if err := todo(); err != nil {
			n.cfg.Log.Error("clean-up will be tried again", "sandbox", b.id, "err", err)
		}
	})
	if !started {
		b.unlock()
	}
}

// due returns what is to be done now, nil if nothing is. Warnings it gives
// itself.
func (b *box) due(now time.Time) func() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	n := b.n
	switch b.rec.State {
	case dsec.Running, dsec.Paused:
		return b.dueLive(now)
	case dsec.Stopping:
		if now.Before(b.retryAt) {
			return nil
		}
		if b.rec.Intent == intentDestroy {
			return func() error { return n.finishDelete(n.ctx, b, nil) }
		}
		return func() error { return n.finishStop(n.ctx, b, nil) }
	case dsec.Starting:
		if b.retryAt.IsZero() || now.Before(b.retryAt) {
			return nil
		}
		return func() error { return n.unstart(n.ctx, b) }
	case dsec.Stopped, dsec.Failed, dsec.Deleted:
		if b.rec.Intent == intentDestroy || b.rec.State == dsec.Deleted {
			if now.Before(b.retryAt) {
				return nil
			}
			return func() error { return n.finishDelete(n.ctx, b, nil) }
		}
		if b.attached == 0 && now.Sub(later(b.rec.Changed, b.active)) >= b.rec.Spec.Lifetimes.Retention {
			return func() error { return n.delete(n.ctx, b, nil, nil) }
		}
	}
	return nil
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// dueLive looks at the lifetimes of a sandbox with processes.
func (b *box) dueLive(now time.Time) func() error {
	n := b.n
	if !b.exitBy.IsZero() && now.After(b.exitBy) {
		return func() error {
			return n.fail(b, dsec.NewResult(dsec.CauseInfraNodeLost, "run", dsec.InducedByPlatform, "found without processes when the agent started"))
		}
	}
	if !b.abandoned.IsZero() && now.Sub(b.abandoned) >= abandonedIn {
		return func() error {
			return n.delete(n.ctx, b, dsec.NewResult(dsec.CauseCancelled, "create", dsec.InducedBySelf, "its creator went away and nobody asked for it"), nil)
		}
	}
	if b.orphan {
		return func() error {
			return n.delete(n.ctx, b, dsec.NewResult(dsec.CauseCancelled, "run", dsec.InducedByPlatform, "nobody waits for its grader"), nil)
		}
	}
	busy := b.attached > 0 || b.running > 0 && b.rec.State == dsec.Running || len(b.rec.Spec.Command) > 0 && b.rec.State == dsec.Running
	if busy {
		b.active = now
	}
	idle := b.active.Add(b.rec.Spec.Lifetimes.Idle)
	end, cause, which, whole := idle, dsec.CauseExpiredIdle, "idle", b.rec.Spec.Lifetimes.Idle
	if e := b.rec.Expires; !e.IsZero() && e.Before(idle) {
		end, cause, which, whole = e, dsec.CauseExpiredLifetime, "lifetime", e.Sub(b.rec.Started)
	}
	if !now.Before(end) && b.warned.Equal(end) {
		res := dsec.NewResult(cause, "run", dsec.InducedBySelf, fmt.Sprintf("%s time of %v was over at %s", which, whole, end.UTC().Format(time.RFC3339)))
		return func() error { return n.stop(n.ctx, b, res, nil) }
	}
	if !now.Before(end.Add(-min(warnMost, whole/4))) && !b.warned.Equal(end) {
		b.warned = end
		b.emitLocked(dsec.Event{Type: dsec.EventExpiryWarning, Detail: fmt.Sprintf("%s time ends at %s", which, end.UTC().Format(time.RFC3339))})
	}
	if p := b.rec.Phase; p != nil && p.Moving != "" && !now.Before(b.retryAt) {
		return func() error { return n.finishPhase(n.ctx, b, nil) }
	}
	return nil
}

// flush writes the records that changed outside a turn, in one commit.
func (n *Node) flush(extra ...op) error {
	var held []*box
	defer func() {
		for _, b := range held {
			b.unlock()
		}
	}()
	ops := extra
	for _, b := range n.all() {
		b.mu.Lock()
		dirty := b.dirty
		b.mu.Unlock()
		if !dirty || !b.tryLock() {
			continue
		}
		held = append(held, b)
		b.mu.Lock()
		if !b.gone && b.rec.State != dsec.Pending && b.rec.State != dsec.Deleted {
			b.rec.Active = b.active
			ops = append(ops, putLive(&b.rec))
			b.dirty = false
		}
		b.mu.Unlock()
	}
	if len(ops) == 0 {
		return nil
	}
	err := n.ledger.commit(ops...)
	if err != nil {
		for _, b := range held {
			b.mu.Lock()
			b.dirty = true
			b.mu.Unlock()
		}
	}
	return err
}

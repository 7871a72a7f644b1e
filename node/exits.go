package node

import (
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/runtime"
)

// receiveExits takes the ends that nobody asked for.
func (n *Node) receiveExits(rt runtime.Runtime) {
	for {
		select {
		case x, ok := <-rt.Exits():
			if !ok {
				return
			}
			if !n.spawn(func() { n.exited(x) }) {
				return
			}
		case <-n.ctx.Done():
			return
		}
	}
}

// exited writes an end down and acknowledges it; a crash in between brings it
// again.
func (n *Node) exited(x runtime.Exit) {
	b := n.find(x.ID)
	if b == nil {
		return // a stray, or deleted: destroying it acknowledges
	}
	if err := b.lock(n.ctx); err != nil {
		return // comes again to the next agent
	}
	defer b.unlock()
	switch b.state() {
	case dsec.Running, dsec.Paused:
		res := dsec.NewResult(x.Cause, "run", x.By, x.Evidence...)
		if err := n.fail(b, res); err != nil {
			n.cfg.Log.Error("end not written", "sandbox", b.id, "cause", x.Cause, "err", err)
			b.mu.Lock()
			b.exitBy = n.cfg.Clock().Add(retryAfter)
			b.mu.Unlock()
		}
	case dsec.Stopped, dsec.Failed:
		if err := b.rt.Stop(n.ctx, b.id, 0); err != nil {
			n.cfg.Log.Error("end not acknowledged", "sandbox", b.id, "err", err)
		}
	}
}

// fail ends a sandbox whose processes are gone already: stopped if its main
// process just ended, else failed. Its disk is kept. The turn is held.
func (n *Node) fail(b *box, res *dsec.Result) error {
	n.lookAtDisks() // before it is said how it ended
	usage := n.sample(n.ctx, b)
	states := []dsec.State{dsec.Failed}
	if res.Cause == dsec.CauseCompleted {
		states = []dsec.State{dsec.Stopping, dsec.Stopped}
	}
	change := func(r *record) {
		r.Intent, r.Result, r.Usage, r.Expires = intentNone, r.verdict(withUsage(res, usage)), usage, time.Time{}
	}
	if err := b.move(change, nil, states...); err != nil {
		return err
	}
	b.mu.Lock()
	b.exitBy = time.Time{}
	b.mu.Unlock()
	b.tellDamage(res)
	n.ended(b)
	n.spawn(b.judge)
	return b.rt.Stop(n.ctx, b.id, 0)
}

package node

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/runtime"
)

const (
	exitWithin = 5 * time.Second // an end that happened without an agent is told by then
	seqJump    = 1 << 12         // more events than a crashed agent can have told and not written
)

// recover compares the ledger with the machine.
func (n *Node) recover(ctx context.Context) error {
	clean, err := n.ledger.takeClean()
	if err != nil {
		return err
	}
	n.crashed = !clean
	records, err := n.ledger.live()
	if err != nil {
		return err
	}
	found := map[kind]map[dsec.SandboxID]runtime.Status{}
	for t, rt := range n.cfg.runtimes() {
		list, err := rt.List(ctx)
		if err != nil {
			return dsec.E(dsec.ClassOf(err), "list sandboxes", t.String(), err)
		}
		found[t] = map[dsec.SandboxID]runtime.Status{}
		for _, s := range list {
			found[t][s.ID] = s
		}
	}
	for _, r := range records {
		if !clean {
			r.Seq += seqJump
		}
		if err := n.recoverOne(ctx, r, found[kindOf(&r.Spec)]); err != nil {
			return err
		}
		for _, f := range found {
			delete(f, r.ID)
		}
	}
	n.removeStrays(ctx, found)
	return n.releaseStrays(ctx)
}

// recoverOne takes a record back into memory. What has to be finished is left
// to the first sweeps, so that a slow one does not hold up the others.
func (n *Node) recoverOne(ctx context.Context, r *record, found map[dsec.SandboxID]runtime.Status) error {
	rt, err := n.runtimeOf(&r.Spec)
	if err != nil {
		return dsec.E(dsec.Unavailable, "adopt sandbox", string(r.ID), err)
	}
	b := n.newBox(*r, rt)
	b.orphan = r.GraderOf != ""
	n.mu.Lock()
	n.boxes[r.ID] = b
	n.mu.Unlock()
	n.cfg.Metrics.moved("", r.State)
	n.budget.force(r.Spec.Limits, &b.held, share{run: r.State.Live(), disk: true})
	if r.State.Live() && r.Spec.Name != "" {
		n.names[nameKey(r.Project, r.Spec.Name)] = r.ID
	}
	status, known := found[r.ID]
	b.turn <- struct{}{}
	defer b.unlock()
	switch r.State {
	case dsec.Pending, dsec.Creating:
		return n.undoCreation(b)
	case dsec.Running, dsec.Paused:
		return n.adopt(ctx, b, status, known)
	case dsec.Starting:
		if known && status.Running {
			starts := r.Starts + 1
			if err := b.move(func(r *record) {
				r.Intent, r.Result, r.Started, r.Starts = intentNone, nil, r.Changed, starts
				r.settle()
			}, nil, dsec.Running); err != nil {
				return err
			}
			return n.adopt(ctx, b, status, known)
		}
		if known {
			n.logged(b, n.unstart(ctx, b))
			return nil
		}
	case dsec.Stopped:
		if status.Running {
			n.logged(b, b.rt.Stop(ctx, b.id, 0))
		}
	}
	if !known && r.Intent != intentDestroy && r.State != dsec.Failed {
		return n.lose(b, "its disk is not there any more")
	}
	return nil
}

func (n *Node) logged(b *box, err error) {
	if err != nil {
		n.cfg.Log.Error("sandbox not stopped", "sandbox", b.id, "err", err)
	}
}

// undoCreation ends what was half-made when the agent died.
func (n *Node) undoCreation(b *box) error {
	res := dsec.NewResult(dsec.CauseInfraNodeLost, "create", dsec.InducedByPlatform, "the agent ended while it was created")
	change := func(r *record) { // which may have processes until it is destroyed
		r.Result, r.Intent, r.Ended = res, intentDestroy, time.Time{}
	}
	if err := b.move(change, nil, dsec.Failed); err != nil {
		return err
	}
	n.ended(b)
	return nil
}

func (n *Node) lose(b *box, why string) error {
	res := dsec.NewResult(dsec.CauseInfraNodeLost, "run", dsec.InducedByPlatform, why)
	b.mu.Lock()
	res.Usage = b.rec.Usage
	if b.rec.Result != nil { // it had ended before
		res = b.rec.Result
	}
	b.mu.Unlock()
	if err := b.move(func(r *record) { r.Result, r.Intent = r.verdict(res), intentDestroy }, nil, dsec.Failed); err != nil {
		return err
	}
	n.ended(b)
	return nil
}

// adopt goes on with a sandbox that lived on without an agent.
func (n *Node) adopt(ctx context.Context, b *box, status runtime.Status, known bool) error {
	b.mu.Lock()
	b.active = n.cfg.Clock() // nobody could use it while there was no agent
	b.mu.Unlock()
	switch {
	case !known:
		return n.lose(b, "nothing of it was there when the agent started")
	case !status.Running:
		b.mu.Lock()
		b.exitBy = n.cfg.Clock().Add(exitWithin)
		b.mu.Unlock()
		return nil
	}
	if want := map[bool]dsec.State{true: dsec.Paused, false: dsec.Running}[status.Paused]; b.state() != want {
		if err := b.move(nil, nil, want); err != nil {
			return err
		}
	}
	b.emit(dsec.Event{Type: dsec.EventAdopted, Detail: fmt.Sprintf("%d commands", len(status.Execs))})
	if n.crashed {
		b.emit(repercussion(toService, dsec.InducedByUnknown, "the agent of the node ended without having been asked to, and came back"))
	}
	e, ok := b.rt.(runtime.Execer)
	if !ok {
		return nil
	}
	for _, x := range status.Execs {
		p, err := e.Process(ctx, b.id, x)
		if err != nil {
			n.cfg.Log.Warn("command not adopted", "sandbox", b.id, "exec", x, "err", err)
			continue
		}
		b.track(p, true)
	}
	return nil
}

// removeStrays destroys what no record knows.
func (n *Node) removeStrays(ctx context.Context, found map[kind]map[dsec.SandboxID]runtime.Status) {
	for t, ids := range found {
		for id := range ids {
			n.cfg.Log.Warn("stray sandbox removed", "sandbox", id, "tier", t)
			if err := n.cfg.runtimes()[t].Destroy(ctx, id); err != nil {
				n.cfg.Log.Error("stray sandbox not removed", "sandbox", id, "tier", t, "err", err)
			}
		}
	}
}

// releaseStrays ends the leases of sandboxes of this node that are no more.
func (n *Node) releaseStrays(ctx context.Context) error {
	leases, err := n.cfg.Store.Leases(ctx)
	if err != nil {
		return dsec.E(dsec.ClassOf(err), "list leases", string(n.cfg.ID), err)
	}
	for _, name := range leases {
		id, node, err := dsec.ParseSandboxID(strings.TrimSuffix(name, packSuffix))
		packing := strings.HasSuffix(name, packSuffix) // nobody packs any more
		if err != nil || node != n.cfg.ID || !packing && n.find(id) != nil {
			continue // somebody else's, or in use
		}
		if err := n.cfg.Store.Release(ctx, name); err != nil {
			return dsec.E(dsec.ClassOf(err), "release lease", name, err)
		}
	}
	return nil
}

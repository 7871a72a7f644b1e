package node

import (
	"context"
	"strconv"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/failpoint"
	"github.com/opendsec/dsec/runtime"
)

// phaseWithin bounds a move: commands that are just starting are waited for, and
// what is hidden or shown is copied.
const phaseWithin = 10 * time.Minute

// checkPhases refuses phases that the tier cannot give as they are written.
func checkPhases(s *dsec.Spec, rt runtime.Runtime) error {
	if len(s.Phases) == 0 {
		return nil
	}
	p, ok := rt.(runtime.Phaser)
	if !ok {
		return dsec.Errorf(dsec.Unsupported, "create sandbox", "phases", "the tier %s has none", kindOf(s))
	}
	return p.CanPhase(*s)
}

// firstPhase is the one a sandbox begins in; nil: it has none.
func firstPhase(s *dsec.Spec, now time.Time) *dsec.PhaseState {
	if len(s.Phases) == 0 {
		return nil
	}
	return &dsec.PhaseState{Name: s.Phases[0].Name, Generation: 1, Since: now}
}

// SetPhase implements Service. The ledger says where to before anything is done;
// from then on the move is finished, by this process or the next one.
func (n *Node) SetPhase(ctx context.Context, id dsec.SandboxID, name, callID string) (Sandbox, error) {
	const op = "set phase of sandbox"
	_, err := n.once(ctx, "set_phase", id, callID, name, func(t *turn) (string, error) {
		now := t.phase()
		if now == nil {
			return "", dsec.Errorf(dsec.IllegalState, op, string(id), "it was made without phases")
		}
		if s := t.state(); s != dsec.Running && s != dsec.Paused {
			return "", t.illegal(op)
		}
		spec := t.rec.Spec // only the turn changes it
		switch {
		case now.Moving != "" && now.Moving != name:
			return "", dsec.Errorf(dsec.IllegalState, op, string(id), "it is on its way to %s", dsec.Quote(now.Moving))
		case now.Moving == "" && now.Name == name:
			return "", n.keep(t.remember(""))
		case now.Moving == "":
			if err := spec.MayMove(string(id), now.Name, name); err != nil {
				return "", err
			}
			going := *now
			going.Moving = name
			if err := t.move(func(r *record) { r.Phase = &going }, nil); err != nil {
				return "", err
			}
		}
		return "", n.finishPhase(ctx, t.box, t.remember(""))
	})
	if err != nil {
		return Sandbox{}, err
	}
	return n.Get(ctx, id)
}

// phase is the one in force; nil: there are none.
func (b *box) phase() *dsec.PhaseState {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.rec.Phase
}

// finishPhase does what the ledger says was begun. The turn is held. What cannot be
// done now leaves the sandbox standing still, and is tried again.
func (n *Node) finishPhase(ctx context.Context, b *box, extra []op) error {
	sctx, done := n.detached(ctx, phaseWithin)
	defer done()
	begun := n.cfg.Clock()
	if err := failpoint.Hit(sctx, "node.phase.runtime"); err != nil {
		return b.laterThan(begun, err)
	}
	was := b.phase()
	p, ok := b.rt.(runtime.Phaser)
	if !ok {
		return b.unsupported("set phase of sandbox")
	}
	moved, err := p.SetPhase(sctx, b.id, was.Moving)
	if err != nil {
		if b.state() == dsec.Running {
			if err := b.move(nil, nil, dsec.Paused); err != nil {
				n.cfg.Log.Error("sandbox between phases not written down as paused", "sandbox", b.id, "err", err)
			}
		}
		return b.laterThan(begun, b.explain("set phase of sandbox", err))
	}
	if err := failpoint.Hit(sctx, "node.phase.done"); err != nil {
		return b.laterThan(begun, err)
	}
	if err := b.arrive(moved, extra); err != nil {
		return b.laterThan(begun, err)
	}
	return nil
}

// arrive writes down that a move is done, and tells it. The turn is held.
func (b *box) arrive(moved runtime.Moved, extra []op) error {
	was := b.phase()
	now := &dsec.PhaseState{Name: was.Moving, Generation: was.Generation + 1, Since: b.n.cfg.Clock().UTC()}
	network := b.rec.Network
	if spec := b.rec.Spec; spec.PhasesNetwork() {
		network = &dsec.NetworkState{NetworkPolicy: spec.PolicyIn(spec.PhaseIndex(now.Name)), Generation: moved.Network}
	}
	var states []dsec.State
	if b.state() == dsec.Paused {
		states = []dsec.State{dsec.Running}
	}
	if err := b.move(func(r *record) { r.Phase, r.Network = now, network }, extra, states...); err != nil {
		return err
	}
	b.emit(dsec.Event{Type: dsec.EventPhase, Detail: now.Name, Fields: map[string]string{"from": was.Name,
		"generation": strconv.FormatUint(now.Generation, 10), "killed": strconv.Itoa(moved.Killed)}})
	b.n.spawn(b.judge)
	return nil
}

// settle: a start finishes a move that was begun before the stop. It may be called
// twice.
func (r *record) settle() {
	if r.Phase != nil && r.Phase.Moving != "" {
		r.Phase = &dsec.PhaseState{Name: r.Phase.Moving, Generation: r.Phase.Generation + 1, Since: r.Changed}
		if r.Spec.PhasesNetwork() {
			r.Network = &dsec.NetworkState{NetworkPolicy: r.Spec.PolicyIn(r.Spec.PhaseIndex(r.Phase.Name)), Generation: 1}
		}
	}
}

// settled is the error of what cannot be done between two phases.
func (b *box) settled(what string) error {
	if p := b.phase(); p != nil && p.Moving != "" {
		return dsec.Errorf(dsec.IllegalState, what, string(b.id), "it is on its way from the phase %s to %s, and nothing runs until it is there", dsec.Quote(p.Name), dsec.Quote(p.Moving))
	}
	return nil
}

package node

import (
	"context"
	"sync"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/image"
	"github.com/opendsec/dsec/runtime"
)

// box is a sandbox that is not deleted.
//
// Its state changes only in its turn, and its record is written only there, so
// that two writes never overtake each other. What commands and clients do to it
// (events, activity) happens outside the turn, in memory, and is written soon.
type box struct {
	n      *Node
	id     dsec.SandboxID
	rt     runtime.Runtime
	turn   chan struct{}           // capacity 1: held by who changes the state
	cancel context.CancelCauseFunc // of its creation; nil for an adopted one
	unpack context.CancelCauseFunc // of a commit at work; guarded by mu
	held   share                   // of the budget; guarded by turn
	left   bool                    // something could not be undone; guarded by turn
	from   string                  // moment of another sandbox that it goes on from; "": it begins anew

	mu         sync.Mutex
	rec        record
	dirty      bool // rec holds what the ledger does not
	ring       []dsec.Event
	execs      map[string]*execution
	running    int // of execs
	ends       int // of execs, ever
	attached   int
	active     time.Time       // last activity
	warned     time.Time       // the deadline that was warned of
	layerError time.Time       // of the last event of that kind
	blames     int             // changes of what it is blamed on
	blamesIn   int             // how many of them are in the ledger
	abandoned  time.Time       // its creator left before it was ready, and nobody came since
	retryAt    time.Time       // of an intent that was not finished
	exitBy     time.Time       // found dead at the start: when to stop waiting for its Exit
	gone       bool            // deleted: out of the maps
	orphan     bool            // of a grader that nobody waits for any more
	config     *image.Config   // of its layers, if not what they say; guarded by turn
	damageLook time.Time       // when its disk was last looked at for damage
	damaged    int             // paths of its system that were told to be gone
	found      map[string]bool // classes of reward hacks that were told
}

const ringEvents = 256

func (n *Node) newBox(rec record, rt runtime.Runtime) *box {
	b := &box{n: n, id: rec.ID, rt: rt, turn: make(chan struct{}, 1), rec: rec, execs: map[string]*execution{}, active: rec.Active}
	b.ring, b.found = append(b.ring, rec.Events...), foundBefore(rec.Events)
	return b
}

// lock waits for the turn.
func (b *box) lock(ctx context.Context) error {
	select {
	case b.turn <- struct{}{}:
		return nil
	case <-ctx.Done():
		return dsec.E(dsec.ClassOf(ctx.Err()), "wait for sandbox", string(b.id), ctx.Err())
	}
}

func (b *box) tryLock() bool {
	select {
	case b.turn <- struct{}{}:
		return true
	default:
		return false
	}
}

func (b *box) unlock() { <-b.turn }

func (b *box) state() dsec.State {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.rec.State
}

func (b *box) sandbox() Sandbox {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.rec.sandbox()
}

// touch is activity.
func (b *box) touch() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.touchLocked()
}

func (b *box) touchLocked() {
	b.active, b.abandoned = b.n.cfg.Clock(), time.Time{}
}

// move takes the sandbox through states, durably: first in the ledger, then
// here. change may set other fields of the record; it is called twice and must
// not depend on that. The turn is held.
func (b *box) move(change func(r *record), extra []op, states ...dsec.State) error {
	b.mu.Lock()
	next := b.rec
	if err := b.step(&next, change, states); err != nil {
		b.mu.Unlock()
		return err
	}
	put := putLive(&next)
	b.mu.Unlock()
	if err := b.n.ledger.commit(append([]op{put}, extra...)...); err != nil {
		return err
	}
	b.applied(change, states)
	return nil
}

// step changes a copy of the record. b.mu is held.
func (b *box) step(r *record, change func(r *record), states []dsec.State) (err error) {
	now := b.n.cfg.Clock().UTC()
	for _, to := range states {
		if r.State, err = dsec.MoveState(string(b.id), r.State, to); err != nil {
			return err
		}
		switch to {
		case dsec.Starting:
			r.Ended = time.Time{}
			if r.Network != nil { // a new link begins with it
				r.Network = &dsec.NetworkState{NetworkPolicy: r.Network.NetworkPolicy, Generation: 1}
			}
		case dsec.Stopped, dsec.Failed, dsec.Deleted:
			if r.Ended.IsZero() {
				r.Ended = now
			}
		}
	}
	r.Changed, r.Active = now, b.active
	if change != nil {
		change(r)
	}
	return nil
}

// applied does in memory what is durable.
func (b *box) applied(change func(r *record), states []dsec.State) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.appliedLocked(change, states)
}

func (b *box) appliedLocked(change func(r *record), states []dsec.State) {
	for _, to := range states {
		from := b.rec.State
		if b.step(&b.rec, nil, []dsec.State{to}) != nil {
			continue // checked when it was written
		}
		e := dsec.Event{Type: dsec.EventState, From: from, To: to}
		b.n.cfg.Metrics.moved(from, to)
		b.emitLocked(e)
	}
	_ = b.step(&b.rec, change, nil) // no state: cannot err
	if b.rec.State == dsec.Running && b.rec.Intent == intentNone && (b.rec.Phase == nil || b.rec.Phase.Moving == "") {
		b.retryAt = time.Time{}
	}
}

// emit adds an event.
func (b *box) emit(e dsec.Event) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.emitLocked(e)
}

func (b *box) emitLocked(e dsec.Event) {
	b.rec.Seq++
	e.Sandbox, e.Seq, e.Time = b.id, b.rec.Seq, b.n.cfg.Clock().UTC()
	if len(b.ring) >= ringEvents {
		b.ring = append(b.ring[:0:0], b.ring[1:]...)
	}
	b.ring = append(b.ring, e)
	b.rec.Events = b.ring[max(0, len(b.ring)-recordEvents):]
	b.dirty = true
	b.n.subs.publish(e, &b.rec)
	b.evidence(e)
}

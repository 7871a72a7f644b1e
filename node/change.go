package node

import (
	"context"
	"errors"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/failpoint"
	"github.com/opendsec/dsec/runtime"
)

// errStopped cancels a creation.
var errStopped = dsec.E(dsec.Canceled, "create sandbox", "", errors.New("stopped or deleted before it was ready"))

// turn is a mutating call in its sandbox's turn.
type turn struct {
	*box
	verb, callID, hash string
	key                []byte
	cancelled          bool // it was this call that ended a creation
}

// remember returns what makes the answer durable together with the change.
func (t *turn) remember(answer string) []op {
	if t.callID == "" {
		return nil
	}
	return []op{putCall(t.key, call{Verb: t.verb, Hash: t.hash, Answer: answer, At: t.n.cfg.Clock().UTC()})}
}

// before returns the answer of the same call, if it was made.
func (n *Node) before(t *turn) (answer string, done bool, err error) {
	if len(t.callID) > maxCallID {
		return "", false, dsec.Errorf(dsec.Invalid, t.verb, "call_id", "%d bytes, at most %d", len(t.callID), maxCallID)
	}
	if t.callID == "" {
		return "", false, nil
	}
	old, err := n.ledger.findCall(t.key)
	switch {
	case err != nil || old == nil:
		return "", false, err
	case old.Verb != t.verb || old.Hash != t.hash:
		return "", false, conflict(t.callID)
	}
	return old.Answer, true, nil
}

// once runs fn in the turn of the sandbox, unless the same call was made before.
// A sandbox that is deleted, or never was, is the error of goneError.
func (n *Node) once(ctx context.Context, verb string, id dsec.SandboxID, callID string, params any, fn func(t *turn) (string, error)) (string, error) {
	t := &turn{verb: verb, callID: callID, hash: hashOf(params), key: callKey(string(id), callID)}
	if answer, done, err := n.before(t); done || err != nil {
		return answer, err
	}
	if t.box = n.find(id); t.box == nil {
		return "", n.goneError(verb, id)
	}
	if verb == "delete" {
		t.endPacking()
	}
	if verb == "delete" || verb == "stop" {
		t.cancelled = t.interrupt()
	}
	if err := t.lock(ctx); err != nil {
		return "", err
	}
	defer t.unlock()
	if answer, done, err := n.before(t); done || err != nil {
		return answer, err
	}
	t.mu.Lock()
	gone := t.gone
	t.touchLocked()
	t.mu.Unlock()
	if gone && t.cancelled && verb == "delete" {
		return "true", n.keep(t.remember("true"))
	}
	if gone {
		return "", n.goneError(verb, id)
	}
	if n.ctx.Err() != nil {
		return "", dsec.E(dsec.Unavailable, verb, string(id), ErrClosed)
	}
	switch verb {
	case "pause", "suspend", "resume", "fork", "checkpoint", "commit", "set_network":
		if err := t.settled(verb); err != nil {
			return "", err
		}
	}
	return fn(t)
}

// interrupt ends a creation that is at work, and says whether it was the first.
func (b *box) interrupt() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.cancel == nil || b.rec.State != dsec.Pending && b.rec.State != dsec.Creating {
		return false
	}
	b.cancel(errStopped)
	b.cancel = nil
	return true
}

// goneError tells a sandbox that ended from one that never was.
func (n *Node) goneError(opName string, id dsec.SandboxID) error {
	r, err := n.ledger.ended(id)
	switch {
	case err != nil:
		return err
	case r == nil:
		return dsec.E(dsec.NotFound, opName, string(id), nil)
	case r.Result != nil:
		return dsec.Errorf(dsec.SandboxGone, opName, string(id), "it ended: %s", r.Result.Cause)
	}
	return dsec.E(dsec.SandboxGone, opName, string(id), nil)
}

// state errors: what a verb cannot do now.
func (b *box) illegal(verb string) error {
	return dsec.Errorf(dsec.IllegalState, verb, string(b.id), "the sandbox is %s", b.state())
}

// Stop implements Service. A stopped, failed or deleted sandbox stays as it is.
func (n *Node) Stop(ctx context.Context, id dsec.SandboxID, cause dsec.Cause, callID string) (Sandbox, error) {
	if cause == "" {
		cause = dsec.CauseCompleted
	}
	_, err := n.once(ctx, "stop", id, callID, cause, func(t *turn) (string, error) {
		return "", n.stop(ctx, t.box, dsec.NewResult(cause, "run", dsec.InducedBySelf), t.remember(""))
	})
	if err != nil && dsec.ClassOf(err) != dsec.SandboxGone {
		return Sandbox{}, err
	}
	return n.Get(ctx, id)
}

// stop ends the processes and keeps the disk. The turn is held.
func (n *Node) stop(ctx context.Context, b *box, res *dsec.Result, extra []op) error {
	switch b.state() {
	case dsec.Running, dsec.Paused:
		n.lookAtDisks() // before it is said how it ended
		usage := n.sample(ctx, b)
		err := b.move(func(r *record) { r.Intent, r.Result, r.Usage = intentStop, r.verdict(withUsage(res, usage)), usage }, nil, dsec.Stopping)
		if err != nil {
			return err
		}
	case dsec.Stopping:
	case dsec.Stopped, dsec.Failed:
		return n.keep(extra)
	default:
		return b.illegal("stop sandbox")
	}
	return n.finishStop(ctx, b, extra)
}

// finishStop does what the ledger says was begun.
func (n *Node) finishStop(ctx context.Context, b *box, extra []op) error {
	sctx, done := n.detached(ctx, n.cfg.StopGrace+undoLimit)
	defer done()
	if err := failpoint.Hit(sctx, "node.stop.runtime"); err != nil {
		return b.later(err)
	}
	if err := b.rt.Stop(sctx, b.id, n.cfg.StopGrace); err != nil {
		return b.later(err)
	}
	if err := b.move(func(r *record) { r.Intent = intentNone }, extra, dsec.Stopped); err != nil {
		return b.later(err)
	}
	n.ended(b)
	n.spawn(b.judge)
	return nil
}

// ended counts an end and frees what processes needed. The turn is held.
func (n *Node) ended(b *box) {
	b.mu.Lock()
	if b.rec.Result != nil {
		n.cfg.Metrics.ends.WithLabelValues(string(b.rec.Result.Cause)).Inc()
	}
	b.mu.Unlock()
	n.settle(b)
}

const retryAfter = 10 * time.Second

// later has the clean-up try again.
func (b *box) later(err error) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.retryAt = b.n.cfg.Clock().Add(retryAfter)
	return err
}

// laterThan is later of what took since begun: what goes wrong because of what a
// sandbox has made takes the machine a tenth of the time at most.
func (b *box) laterThan(begun time.Time, err error) error {
	now := b.n.cfg.Clock()
	b.mu.Lock()
	defer b.mu.Unlock()
	b.retryAt = now.Add(max(retryAfter, 9*now.Sub(begun)))
	return err
}

// keep writes an answer that changed nothing.
func (n *Node) keep(extra []op) error {
	if len(extra) == 0 {
		return nil
	}
	return n.ledger.commit(extra...)
}

func withUsage(res *dsec.Result, u dsec.Usage) *dsec.Result {
	r := *res
	r.Usage = u
	return &r
}

// sample adds what this run used to what earlier ones did.
func (n *Node) sample(ctx context.Context, b *box) dsec.Usage {
	s, err := b.rt.Stats(ctx, b.id)
	b.mu.Lock()
	defer b.mu.Unlock()
	u := b.rec.Usage
	if !b.rec.Started.IsZero() {
		u.Wall += max(0, n.cfg.Clock().Sub(b.rec.Started))
	}
	u.Starts = b.rec.Starts
	if err == nil { // else it is gone, and so are its numbers
		u.CPU, u.Throttled, u.OOMKills = u.CPU+s.CPU, u.Throttled+s.Throttled, u.OOMKills+s.OOMKills
		u.MemoryPeak, u.PidsPeak, u.DiskUsed = max(u.MemoryPeak, s.MemoryPeak), max(u.PidsPeak, s.PidsPeak), s.Disk
	}
	return u
}

// Start implements Service.
func (n *Node) Start(ctx context.Context, id dsec.SandboxID, callID string) (Sandbox, error) {
	_, err := n.once(ctx, "start", id, callID, nil, func(t *turn) (string, error) {
		switch t.state() {
		case dsec.Running, dsec.Paused:
			return "", n.keep(t.remember(""))
		case dsec.Stopped:
			return "", n.start(ctx, t.box, t.remember(""))
		}
		return "", t.illegal("start sandbox")
	})
	if err != nil {
		return Sandbox{}, err
	}
	return n.Get(ctx, id)
}

// start runs a stopped sandbox again. The turn is held.
func (n *Node) start(ctx context.Context, b *box, extra []op) (err error) {
	b.forgetEnded()
	spec, starts := b.rec.Spec, b.rec.Starts+1 // only the turn changes them
	if err := n.takeName(b.rec.Project, spec.Name, b.id); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			n.settle(b)
		}
	}()
	if err := n.budget.take(spec.Limits, &b.held, share{run: true}); err != nil {
		return err
	}
	if err := n.starts.enter(ctx); err != nil {
		return err
	}
	defer n.starts.leave()
	if err := b.move(func(r *record) { r.Intent = intentStart }, nil, dsec.Starting); err != nil {
		return err
	}
	sctx, stop := context.WithTimeout(ctx, n.cfg.StartTime)
	defer stop()
	steps, err := b.rt.Start(sctx, b.id)
	if err == nil {
		err = b.move(func(r *record) {
			r.Intent, r.Result, r.Started, r.Steps = intentNone, nil, r.Changed, steps
			r.Starts = starts
			r.settle()
			if l := spec.Lifetimes.Lifetime; l > 0 {
				r.Expires = r.Changed.Add(l)
			}
		}, extra, dsec.Running)
	}
	if err == nil {
		n.trackMain(ctx, b)
		return nil
	}
	return errors.Join(err, n.unstart(ctx, b))
}

// forgetEnded lets ids of commands of an earlier run be used again.
func (b *box) forgetEnded() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for id, x := range b.execs {
		if x.ended {
			delete(b.execs, id)
		}
	}
}

// unstart takes a start back: the sandbox is stopped as it was.
func (n *Node) unstart(ctx context.Context, b *box) error {
	uctx, stop := n.detached(ctx, undoLimit)
	defer stop()
	if err := b.rt.Stop(uctx, b.id, 0); err != nil {
		return b.later(err)
	}
	if err := b.move(func(r *record) { r.Intent = intentNone }, nil, dsec.Stopping, dsec.Stopped); err != nil {
		return b.later(err)
	}
	return nil
}

// Pause implements Service: no process of the sandbox runs until Resume, or
// until a command is started in it.
func (n *Node) Pause(ctx context.Context, id dsec.SandboxID, callID string) (Sandbox, error) {
	_, err := n.once(ctx, "pause", id, callID, nil, func(t *turn) (string, error) {
		p, ok := t.rt.(runtime.Pauser)
		if !ok {
			return "", t.unsupported("pause sandbox")
		}
		switch t.state() {
		case dsec.Paused:
			return "", n.keep(t.remember(""))
		case dsec.Running:
		default:
			return "", t.illegal("pause sandbox")
		}
		if err := p.Pause(ctx, id); err != nil {
			return "", err
		}
		err := t.move(nil, t.remember(""), dsec.Paused)
		if r, ok := t.rt.(runtime.Resumer); err != nil && ok {
			uctx, stop := n.detached(ctx, undoLimit)
			defer stop()
			err = errors.Join(err, r.Resume(uctx, id))
		}
		return "", err
	})
	if err != nil {
		return Sandbox{}, err
	}
	return n.Get(ctx, id)
}

// Suspend implements Forker.
func (n *Node) Suspend(ctx context.Context, id dsec.SandboxID, callID string) (Sandbox, error) {
	const op = "suspend sandbox"
	_, err := n.once(ctx, "suspend", id, callID, nil, func(t *turn) (string, error) {
		p, ok := t.rt.(runtime.Suspender)
		if !ok {
			return "", t.unsupported(op)
		}
		if s := t.state(); s != dsec.Running && s != dsec.Paused {
			return "", t.illegal(op)
		}
		if err := p.Suspend(ctx, id); err != nil {
			return "", err
		}
		if t.state() == dsec.Paused {
			return "", n.keep(t.remember(""))
		}
		err := t.move(nil, t.remember(""), dsec.Paused)
		if r, ok := t.rt.(runtime.Resumer); err != nil && ok {
			uctx, stop := n.detached(ctx, undoLimit)
			defer stop()
			err = errors.Join(err, r.Resume(uctx, id))
		}
		return "", err
	})
	if err != nil {
		return Sandbox{}, err
	}
	return n.Get(ctx, id)
}

// Resume implements Service.
func (n *Node) Resume(ctx context.Context, id dsec.SandboxID, callID string) (Sandbox, error) {
	_, err := n.once(ctx, "resume", id, callID, nil, func(t *turn) (string, error) {
		if t.state() == dsec.Running {
			return "", n.keep(t.remember(""))
		}
		return "", n.resume(ctx, t.box, t.remember(""))
	})
	if err != nil {
		return Sandbox{}, err
	}
	return n.Get(ctx, id)
}

// resume thaws a paused sandbox. The turn is held.
func (n *Node) resume(ctx context.Context, b *box, extra []op) error {
	r, ok := b.rt.(runtime.Resumer)
	if !ok {
		return b.unsupported("resume sandbox")
	}
	if b.state() != dsec.Paused {
		return b.illegal("resume sandbox")
	}
	if err := r.Resume(ctx, b.id); err != nil {
		return err
	}
	return b.move(nil, extra, dsec.Running)
}

func (b *box) unsupported(what string) error {
	return dsec.Errorf(dsec.Unsupported, what, string(b.id), "the tier %s cannot", kindOf(&b.rec.Spec))
}

// Renew implements Service. A lifetime of 0 moves the idle clock only.
func (n *Node) Renew(ctx context.Context, id dsec.SandboxID, lifetime time.Duration, callID string) (Sandbox, error) {
	if lifetime < 0 || lifetime > dsec.MaxLifetime {
		return Sandbox{}, dsec.Errorf(dsec.Invalid, "renew sandbox", string(id), "lifetime %v, want 0 to %v", lifetime, dsec.MaxLifetime)
	}
	_, err := n.once(ctx, "renew", id, callID, lifetime, func(t *turn) (string, error) {
		if !t.state().Live() {
			return "", t.illegal("renew sandbox")
		}
		end := n.cfg.Clock().UTC().Add(lifetime)
		return "", t.move(func(r *record) {
			if lifetime > 0 {
				r.Expires = end
			}
		}, t.remember(""))
	})
	if err != nil {
		return Sandbox{}, err
	}
	return n.Get(ctx, id)
}

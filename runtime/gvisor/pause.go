package gvisor

import (
	"context"
	"errors"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/process"
	"github.com/opendsec/dsec/runtime/gvisor/inside"
	"github.com/opendsec/dsec/runtime/tier"
)

// Pause stops all tasks of a running sandbox; the clocks of its commands stop. The sentry stops them, and is not frozen
// itself: the freezer disturbs stubs that wait for the sentry by seccomp notifications, each of which is asked again under
// another number, until the sentry takes a stub for dead and its command ends with SIGSEGV or SIGKILL (gVisor issue 14429).
func (r *Runtime) Pause(ctx context.Context, id dsec.SandboxID) error {
	const op = "pause sandbox"
	sb, err := r.boxes.Acquire(ctx, op, id)
	if err != nil {
		return err
	}
	defer sb.Leave()
	if _, err := r.boxes.Live(op, id); err != nil {
		return err
	}
	if sb.IsPaused() {
		return nil
	}
	// The clock first: a deadline must not fire while the stopping takes its time.
	if err := r.hold.HoldClock(ctx, name(id), true); err != nil {
		return explain(op, sb, err)
	}
	err = r.markStill(sb, true)
	if err == nil {
		err = r.tell(ctx, sb, inside.RolePause)
	}
	if err != nil {
		return tier.Wrap(op, id, errors.Join(err, r.goOn(context.WithoutCancel(ctx), sb)))
	}
	sb.Mu.Lock()
	defer sb.Mu.Unlock()
	sb.Paused = true
	return nil
}

// Resume has a paused sandbox go on.
func (r *Runtime) Resume(ctx context.Context, id dsec.SandboxID) error {
	const op = "resume sandbox"
	sb, err := r.boxes.Acquire(ctx, op, id)
	if err != nil {
		return err
	}
	defer sb.Leave()
	if _, err := r.boxes.Live(op, id); err != nil {
		return err
	}
	if !sb.IsPaused() {
		return nil
	}
	return tier.Wrap(op, id, r.goOn(ctx, sb))
}

// goOn undoes a pause, whatever came of it.
func (r *Runtime) goOn(ctx context.Context, sb *sandbox) error {
	if err := r.tell(ctx, sb, inside.RoleResume); err != nil {
		return err
	}
	if err := r.markStill(sb, false); err != nil {
		return err
	}
	if err := r.hold.HoldClock(ctx, name(sb.ID), false); err != nil {
		return err
	}
	sb.Mu.Lock()
	defer sb.Mu.Unlock()
	sb.Paused = false
	return nil
}

// markStill writes down that the sandbox is paused, for the next process.
func (r *Runtime) markStill(sb *sandbox, still bool) error {
	rec := *sb.record()
	rec.Still = still
	if err := writeRecord(r.dir(sb.ID), &rec); err != nil {
		return dsec.E(dsec.Internal, "write state of sandbox", string(sb.ID), err)
	}
	sb.Mu.Lock()
	defer sb.Mu.Unlock()
	sb.rec = &rec
	return nil
}

// tellLimit is how long a sentry may take to stop its tasks, or to have them go on.
const tellLimit = 20 * time.Second

// tell runs a command of ours that only speaks to the sentry.
func (r *Runtime) tell(ctx context.Context, sb *sandbox, role string) error {
	ctx, cancel := context.WithTimeout(ctx, tellLimit)
	defer cancel()
	p, err := r.own(ctx, name(sb.ID), sb.ID, ownPrefix+"tell"+dsec.Random(8), role, runscOf(sb.record().Request.Spec.HasLink()))
	if err != nil {
		return err
	}
	defer r.releaseAfter(ctx, p)
	res, err := p.Wait(ctx)
	if err == nil && (res.Status != process.Exited || res.ExitCode != 0) {
		err = dsec.E(dsec.Unavailable, "tell sentry of sandbox", string(sb.ID), errors.New(r.reason(ctx, p, nil)))
	}
	return err
}

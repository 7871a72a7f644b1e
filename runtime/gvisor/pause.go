package gvisor

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/process"
	"github.com/opendsec/dsec/runtime"
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
	// The clock first: a deadline must not fire while the stopping takes its time.
	if err := r.hold.HoldClock(ctx, name(id), true); err != nil {
		return explain(op, sb, err)
	}
	// From here on it is paused until all of goOn is done.
	if err = r.markStill(sb, true); err == nil {
		err = r.tell(ctx, sb, inside.RolePause)
	}
	if err != nil {
		return tier.Wrap(op, id, errors.Join(err, r.goOn(context.WithoutCancel(ctx), sb)))
	}
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
	return r.hold.HoldClock(ctx, name(sb.ID), false)
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
	sb.rec, sb.Paused = &rec, still
	return nil
}

// tellLimit is how long a sentry may take to stop its tasks, or to have them go on.
const tellLimit = time.Minute

const tellPrefix = ownPrefix + "tell"

// tell runs a command of ours that only speaks to the sentry. It is not given up with its caller: runsc writes down what it
// has done after it was done, and one that is killed in between has the next believe the opposite. A sandbox whose sentry
// does not answer, or where nobody knows what it was told, is ended.
func (r *Runtime) tell(ctx context.Context, sb *sandbox, role string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), tellLimit)
	defer cancel()
	p, err := r.own(ctx, name(sb.ID), sb.ID, tellPrefix+dsec.Random(8), role, runscOf(sb.record().Request.Spec.HasLink()))
	if err != nil {
		return err
	}
	defer r.releaseAfter(ctx, p)
	return r.told(ctx, sb, p)
}

// told waits for the end of such a command.
func (r *Runtime) told(ctx context.Context, sb *sandbox, p process.Process) error {
	const op = "tell sentry of sandbox"
	res, err := p.Wait(ctx)
	switch {
	case err == nil && res.Status == process.Exited && res.Signal == 0:
		if res.ExitCode == 0 {
			return nil
		}
		return dsec.E(dsec.Internal, op, string(sb.ID), errors.New(r.reason(ctx, p, nil)))
	case err == nil:
		err = fmt.Errorf("%s, signal %d", res.Status, res.Signal)
	case !errors.Is(ctx.Err(), context.DeadlineExceeded): // there is nobody to ask, which the next process will
		return err
	}
	r.end(sb, runtime.Exit{Cause: dsec.CauseInfraNodeLost, By: dsec.InducedByPlatform, Evidence: []string{"the sentry did not say whether it is paused: " + err.Error()}})
	return dsec.E(dsec.SandboxGone, op, string(sb.ID), err)
}

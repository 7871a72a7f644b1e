package gvisor

import (
	"context"
	"errors"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/runtime/tier"
)

// Pause freezes a running sandbox; the clocks of its commands stop.
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
	sb.Mu.Lock()
	g, paused := sb.group, sb.Paused
	sb.Mu.Unlock()
	if paused {
		return nil
	}
	// The clock first: a deadline must not fire while the freezing takes its time.
	if err := r.hold.HoldClock(ctx, name(id), true); err != nil {
		return explain(op, sb, err)
	}
	if err := g.Freeze(ctx); err != nil {
		return tier.Wrap(op, id, errors.Join(err, r.hold.HoldClock(context.WithoutCancel(ctx), name(id), false)))
	}
	sb.Mu.Lock()
	sb.Paused = true
	sb.Mu.Unlock()
	return nil
}

// Resume thaws a paused sandbox.
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
	return tier.Wrap(op, id, r.thaw(ctx, sb))
}

func (r *Runtime) thaw(ctx context.Context, sb *sandbox) error {
	sb.Mu.Lock()
	g, paused := sb.group, sb.Paused
	sb.Mu.Unlock()
	if !paused || g == nil {
		return nil
	}
	if err := g.Thaw(ctx); err != nil {
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

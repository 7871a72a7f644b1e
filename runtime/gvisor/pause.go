package gvisor

import (
	"context"
	"errors"

	"github.com/opendsec/dsec"
)

// Pause freezes a running sandbox; the clocks of its commands stop.
func (r *Runtime) Pause(ctx context.Context, id dsec.SandboxID) error {
	const op = "pause sandbox"
	sb, err := r.acquire(ctx, op, id)
	if err != nil {
		return err
	}
	defer sb.unlock()
	if _, err := r.live(op, id); err != nil {
		return err
	}
	sb.mu.Lock()
	g, paused := sb.group, sb.paused
	sb.mu.Unlock()
	if paused {
		return nil
	}
	// The clock first: a deadline must not fire while the freezing takes its time.
	if err := r.hold.HoldClock(ctx, name(id), true); err != nil {
		return explain(op, sb, err)
	}
	if err := g.Freeze(ctx); err != nil {
		return wrap(op, id, errors.Join(err, r.hold.HoldClock(context.WithoutCancel(ctx), name(id), false)))
	}
	sb.mu.Lock()
	sb.paused = true
	sb.mu.Unlock()
	return nil
}

// Resume thaws a paused sandbox.
func (r *Runtime) Resume(ctx context.Context, id dsec.SandboxID) error {
	const op = "resume sandbox"
	sb, err := r.acquire(ctx, op, id)
	if err != nil {
		return err
	}
	defer sb.unlock()
	if _, err := r.live(op, id); err != nil {
		return err
	}
	return wrap(op, id, r.thaw(ctx, sb))
}

func (r *Runtime) thaw(ctx context.Context, sb *sandbox) error {
	sb.mu.Lock()
	g, paused := sb.group, sb.paused
	sb.mu.Unlock()
	if !paused || g == nil {
		return nil
	}
	if err := g.Thaw(ctx); err != nil {
		return err
	}
	if err := r.hold.HoldClock(ctx, name(sb.id), false); err != nil {
		return err
	}
	sb.mu.Lock()
	defer sb.mu.Unlock()
	sb.paused = false
	return nil
}

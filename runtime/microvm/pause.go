package microvm

import (
	"context"
	"errors"
	"net"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/guest"
	"github.com/opendsec/dsec/internal/lifecycle"
	"github.com/opendsec/dsec/runtime/tier"
)

// Pause freezes what runs in a sandbox; the clocks of its commands stop. The machine goes on,
// with nothing to do, and its agent answers.
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
	if sb.IsPaused() { // or suspended
		return nil
	}
	c, err := r.session(ctx, sb)
	if err != nil {
		return err
	}
	if err := r.freeze(ctx, sb, c, false); err != nil {
		return tier.Wrap(op, id, r.explain(op, sb, err))
	}
	sb.setPaused(true)
	return nil
}

// freeze stops what runs in a sandbox. After an error it goes on, if it did before.
func (r *Runtime) freeze(ctx context.Context, sb *sandbox, c *guest.Client, sync bool) error {
	limited, cancel := context.WithTimeout(ctx, freezeTime)
	defer cancel()
	err := c.Freeze(limited, sync)
	if err != nil { // it may be frozen all the same
		err = errors.Join(err, r.goOn(ctx, sb))
	}
	return err
}

// goOn has a sandbox that is not paused go on; one that does not is paused, so that it can be
// tried again.
func (r *Runtime) goOn(ctx context.Context, sb *sandbox) error {
	if sb.IsPaused() {
		return nil
	}
	late, cancel := context.WithTimeout(context.WithoutCancel(ctx), lifecycle.UndoLimit)
	defer cancel()
	err := r.begin(late, sb, sb.record())
	if err != nil {
		sb.setPaused(true)
	}
	return err
}

func (sb *sandbox) setPaused(v bool) {
	sb.Mu.Lock()
	defer sb.Mu.Unlock()
	sb.Paused = v
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
	return tier.Wrap(op, id, r.explain(op, sb, r.thaw(ctx, sb)))
}

func (r *Runtime) thaw(ctx context.Context, sb *sandbox) error {
	if err := r.bringBackInTurn(ctx, sb); err != nil {
		return err
	}
	if err := r.begin(ctx, sb, sb.record()); err != nil {
		return err
	}
	sb.setPaused(false)
	return nil
}

// Dial connects to a port of the sandbox's loopback.
func (r *Runtime) Dial(ctx context.Context, id dsec.SandboxID, port uint16) (net.Conn, error) {
	const op = "connect to sandbox"
	sb, err := r.boxes.Live(op, id)
	if err != nil {
		return nil, err
	}
	if err := r.bringBack(ctx, sb); err != nil {
		return nil, err
	}
	c, err := r.session(ctx, sb)
	if err != nil {
		return nil, err
	}
	conn, err := c.Dial(ctx, port)
	if err != nil {
		if errors.Is(err, dsec.SandboxGone.Err()) {
			return nil, dsec.E(dsec.SandboxGone, op, string(id), err)
		}
		return nil, r.explain(op, sb, err)
	}
	return conn, nil
}

package fullvm

import (
	"context"
	"errors"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/lifecycle"
	"github.com/opendsec/dsec/runtime/microvm/vmm"
	"github.com/opendsec/dsec/runtime/tier"
)

// off ends the machine of a sandbox, if there is one, and the session with it.
func (r *Runtime) off(sb *sandbox) {
	sb.Mu.Lock()
	vm := sb.vm
	sb.Stopping = sb.Phase != tier.Ended
	sb.Mu.Unlock()
	sb.letGo()
	if vm != nil {
		ctx, cancel := context.WithTimeout(context.Background(), lifecycle.UndoLimit)
		defer cancel()
		if err := vm.Stop(ctx); err != nil { // and was killed
			r.log.Warn("stop a machine", "sandbox", sb.ID, "err", err)
		}
	}
	sb.Mu.Lock()
	defer sb.Mu.Unlock()
	if sb.vm == vm {
		sb.vm, sb.client = nil, nil
	}
}

// Stop asks the main command, or else the system, to end, waits for grace, then ends the machine.
func (r *Runtime) Stop(ctx context.Context, id dsec.SandboxID, grace time.Duration) error {
	const op = "stop sandbox"
	sb, err := r.acquire(ctx, op, id)
	if err != nil {
		return err
	}
	defer sb.Leave()
	if sb.GetPhase() == tier.Stopped {
		return nil
	}
	if sb.GetPhase() == tier.Running {
		r.ask(ctx, sb, grace)
	}
	if err := ctx.Err(); err != nil {
		return dsec.E(dsec.ClassOf(err), op, string(id), context.Cause(ctx))
	}
	hctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*lifecycle.UndoLimit)
	defer cancel()
	return tier.Wrap(op, id, r.halt(hctx, sb))
}

// ask gives what runs a chance to end by itself. That it does not is no error.
func (r *Runtime) ask(ctx context.Context, sb *sandbox, grace time.Duration) {
	sb.Mu.Lock()
	sb.Stopping = true // its end is what was asked for
	vm, c, rec := sb.vm, sb.client, sb.rec
	sb.Mu.Unlock()
	if vm == nil {
		return
	}
	if rec.Paused {
		_ = vm.Resume(ctx) // who stands still does not hear
	}
	ctx, cancel := context.WithTimeout(ctx, grace+lifecycle.UndoLimit)
	defer cancel()
	if c != nil {
		_ = c.Resume(ctx, resumption())
		_ = c.Shutdown(ctx, grace) // the disk has all it wrote when this returns
		return
	}
	if grace <= 0 || vm.PowerButton(ctx) != nil {
		return
	}
	late := time.NewTimer(grace)
	defer late.Stop()
	select {
	case <-vm.Done():
	case <-late.C:
	case <-ctx.Done():
	}
}

// halt ends the machine and keeps the disk.
func (r *Runtime) halt(ctx context.Context, sb *sandbox) error {
	last, serr := r.sample(ctx, sb)
	if serr != nil {
		r.log.Warn("sample a sandbox at its end", "sandbox", sb.ID, "err", serr)
	}
	r.off(sb)
	if err := r.removeGroup(ctx, sb); err != nil {
		return err
	}
	r.cfg.Mounts.Unuse(string(sb.ID))
	if err := r.change(sb, func(rec *record) {
		rec.Stopped, rec.Paused, rec.Exit, rec.Last = true, false, nil, &last
	}); err != nil {
		return err
	}
	r.ends.Acknowledge(sb.ID)
	sb.Mu.Lock()
	defer sb.Mu.Unlock()
	sb.Phase, sb.Stopping = tier.Stopped, false
	return nil
}

// Destroy removes everything of an id, whatever there is of it.
func (r *Runtime) Destroy(ctx context.Context, id dsec.SandboxID) error {
	const op = "destroy sandbox"
	if _, _, err := dsec.ParseSandboxID(string(id)); err != nil {
		return err
	}
	sb := r.boxes.Reserve(id)
	undo := sb.announceRemoval() // ends what is in flight before its turn comes
	if err := sb.Enter(ctx, op); err != nil {
		undo()
		return err
	}
	defer sb.Leave()
	if !r.boxes.Current(sb) {
		return nil // another call destroyed it
	}
	sb.SetPhase(tier.Removing)
	// Once begun it is finished: a half-destroyed sandbox serves nobody.
	dctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*lifecycle.UndoLimit)
	defer cancel()
	return tier.Wrap(op, id, r.remove(dctx, sb))
}

// announceRemoval makes calls into a running sandbox fail from now on.
func (sb *sandbox) announceRemoval() (undo func()) {
	sb.Mu.Lock()
	defer sb.Mu.Unlock()
	was, c := sb.Phase, sb.client
	if was != tier.Running && was != tier.Ended {
		return func() {}
	}
	sb.Phase, sb.Stopping = tier.Removing, true
	if c != nil {
		go func() { _ = c.Close() }()
	}
	return func() {
		sb.Mu.Lock()
		defer sb.Mu.Unlock()
		if sb.Phase == tier.Removing {
			sb.Phase, sb.Stopping = was, false
		}
	}
}

// remove is all the undos of creation, by name. The state goes last.
func (r *Runtime) remove(ctx context.Context, sb *sandbox) error {
	r.kill(sb)
	err := errors.Join(r.killNamed(ctx, sb.machine()), r.removeGroup(ctx, sb))
	r.cfg.Mounts.Unuse(string(sb.ID))
	if err = errors.Join(err, r.cfg.Disks.Remove(ctx, string(sb.ID))); err != nil {
		return err
	}
	if err := r.removeState(sb.ID); err != nil {
		return err
	}
	r.forget(sb)
	return nil
}

// kill is off without waiting for the disk.
func (r *Runtime) kill(sb *sandbox) {
	sb.Mu.Lock()
	vm := sb.vm
	sb.Mu.Unlock()
	if vm != nil {
		vm.Kill()
	}
	r.off(sb)
}

// killNamed ends a machine that nobody here has.
func (r *Runtime) killNamed(ctx context.Context, name string) error {
	vm, err := r.cfg.Machines.Adopt(ctx, name)
	switch dsec.ClassOf(err) {
	case "":
		vm.Kill()
		return nil
	case dsec.NotFound, dsec.SandboxGone:
		return nil
	}
	return err
}

// Pause stops the processors of the machine.
func (r *Runtime) Pause(ctx context.Context, id dsec.SandboxID) error {
	return r.turnTo(ctx, "pause sandbox", id, true)
}

// Resume lets them go on; the guest is told what time it is.
func (r *Runtime) Resume(ctx context.Context, id dsec.SandboxID) error {
	return r.turnTo(ctx, "resume sandbox", id, false)
}

func (r *Runtime) turnTo(ctx context.Context, op string, id dsec.SandboxID, paused bool) error {
	sb, err := r.acquire(ctx, op, id)
	if err != nil {
		return err
	}
	defer sb.Leave()
	_, vm, err := r.live(op, id)
	if err != nil {
		return err
	}
	switch was := sb.IsPaused(); {
	case was && paused:
		return tier.Wrap(op, id, vm.Pause(ctx))
	case was == paused:
		return nil
	}
	// Written first: whoever finds it so makes it so.
	if err := r.change(sb, func(rec *record) { rec.Paused = paused }); err != nil {
		return err
	}
	if !paused {
		return tier.Wrap(op, id, r.goOn(ctx, sb))
	}
	if err = r.stand(ctx, sb, vm); err != nil {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), lifecycle.UndoLimit)
		defer cancel()
		err = errors.Join(err, r.goOn(ctx, sb), r.change(sb, func(rec *record) { rec.Paused = false }))
	}
	return tier.Wrap(op, id, err)
}

// stand stops a machine. Its agent is told before, so that the clocks of commands know; one that does not answer
// keeps nothing from being stopped.
func (r *Runtime) stand(ctx context.Context, sb *sandbox, vm vmm.Desk) error {
	sb.Mu.Lock()
	c := sb.client
	sb.Mu.Unlock()
	if c != nil {
		fctx, cancel := context.WithTimeout(ctx, lifecycle.UndoLimit)
		if err := c.Freeze(fctx, false); err != nil {
			r.log.Warn("freeze the commands of a machine", "sandbox", sb.ID, "err", err)
		}
		cancel()
	}
	return vm.Pause(ctx)
}

// goOn has a machine run, and its guest know that it stood still.
func (r *Runtime) goOn(ctx context.Context, sb *sandbox) error {
	sb.Mu.Lock()
	vm, c := sb.vm, sb.client
	sb.Mu.Unlock()
	if vm == nil {
		return dsec.Errorf(dsec.SandboxGone, "resume", "virtual machine", "it has ended")
	}
	if err := vm.Resume(ctx); err != nil {
		return err
	}
	if c != nil {
		ctx, cancel := context.WithTimeout(ctx, answerTime)
		defer cancel()
		if err := c.Resume(ctx, resumption()); err != nil {
			r.log.Warn("tell a guest the time", "sandbox", sb.ID, "err", err)
			_ = c.Close() // the next session begins with it
		}
	}
	return nil
}

package microvm

import (
	"context"
	"errors"
	"os"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/lifecycle"
	"github.com/opendsec/dsec/runtime"
	"github.com/opendsec/dsec/runtime/tier"
)

// Destroy removes everything of an id, whatever there is of it.
func (r *Runtime) Destroy(ctx context.Context, id dsec.SandboxID) error {
	const op = "destroy sandbox"
	if _, _, err := dsec.ParseSandboxID(string(id)); err != nil {
		return err
	}
	sb := r.boxes.Reserve(id)
	// Ends what is in flight before its turn comes; a creation under way is waited for.
	undo := r.announceRemoval(sb)
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
	dctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), lifecycle.UndoLimit)
	defer cancel()
	return tier.Wrap(op, id, r.remove(dctx, sb))
}

// giveUpLocked lets those go on who wait for a suspended sandbox to be back.
func (sb *sandbox) giveUpLocked() {
	if sb.suspended != nil {
		close(sb.suspended)
		sb.suspended = nil
	}
}

// announceRemoval makes calls into a running sandbox fail from now on. The undo is for a removal
// that does not get its turn.
func (r *Runtime) announceRemoval(sb *sandbox) (undo func()) {
	sb.Mu.Lock()
	was, c, m := sb.Phase, sb.client, sb.machine
	if was == tier.Running || was == tier.Ended {
		sb.Phase = tier.Removing
	}
	sb.Mu.Unlock()
	if was != tier.Running && was != tier.Ended {
		return func() {}
	}
	if c != nil {
		_ = c.Close()
	}
	return func() {
		sb.Mu.Lock()
		back := sb.Phase == tier.Removing
		if back {
			sb.Phase = was
		}
		sb.Mu.Unlock()
		if back && was == tier.Running && m != nil { // who watched it has looked away
			r.watch(sb, m)
		}
	}
}

// remove is all the undos of creation, by name. The state goes last, when nothing else is left.
func (r *Runtime) remove(ctx context.Context, sb *sandbox) error {
	sb.services.Close()
	err := errors.Join(r.endDisk(ctx, sb), sb.endMachine(ctx), r.hold.Drop(ctx, netName(sb.ID)))
	if err != nil {
		return err
	}
	if err := r.groups.Remove(ctx, shared(sb.ID)); err != nil {
		return err
	}
	if err := r.disks.Remove(ctx, shared(sb.ID)); err != nil {
		return err
	}
	if err := r.removeState(sb.ID); err != nil {
		return err
	}
	r.forget(sb)
	return nil
}

// Stop asks the main process to end, waits for grace, then ends everything.
func (r *Runtime) Stop(ctx context.Context, id dsec.SandboxID, grace time.Duration) error {
	const op = "stop sandbox"
	sb, err := r.boxes.Acquire(ctx, op, id)
	if err != nil {
		return err
	}
	defer sb.Leave()
	if sb.GetPhase() == tier.Stopped {
		return nil
	}
	if sb.record() == nil {
		return dsec.Errorf(dsec.SandboxGone, op, string(id), "the sandbox is being removed")
	}
	sctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), max(grace, 0)+2*lifecycle.UndoLimit)
	defer cancel()
	return tier.Wrap(op, id, r.halt(sctx, sb, grace))
}

// halt ends the machine of a sandbox and keeps the disk.
func (r *Runtime) halt(ctx context.Context, sb *sandbox, grace time.Duration) error {
	sb.Mu.Lock()
	sb.Stopping = true
	sb.Mu.Unlock()
	last, err := r.sample(ctx, sb)
	if err != nil {
		r.log.Warn("sample a sandbox at its end", "sandbox", sb.ID, "err", err)
	}
	if err := r.powerOff(ctx, sb, grace); err != nil {
		return err
	}
	if err := r.endDisk(ctx, sb); err != nil {
		return err
	}
	if err := r.groups.Remove(ctx, shared(sb.ID)); err != nil {
		return err
	}
	last.Memory, last.HostMemory, last.Pids = 0, 0, 0
	if err := r.rewrite(sb, func(rec *record) {
		rec.Stopped, rec.Lease, rec.Last, rec.Suspended, rec.Execs = true, nil, &last, false, nil
	}); err != nil {
		return err
	}
	if err := errors.Join(forgetExit(r.dir(sb.ID)), os.RemoveAll(r.memory(sb.ID))); err != nil {
		return err
	}
	r.ends.Acknowledge(sb.ID)
	sb.Mu.Lock()
	defer sb.Mu.Unlock()
	sb.group, sb.Phase, sb.exit, sb.Paused, sb.Stopping = nil, tier.Stopped, nil, false, false
	sb.giveUpLocked()
	return nil
}

// powerOff ends what runs in a sandbox and its machine. A guest that does not answer is not
// asked twice: its disk is then as after a loss of power.
func (r *Runtime) powerOff(ctx context.Context, sb *sandbox, grace time.Duration) error {
	sb.services.Close()
	sb.Mu.Lock()
	m, p := sb.machine, sb.Phase
	sb.Mu.Unlock()
	if m != nil && !tier.IsDone(m.Done()) && p != tier.Removing {
		limited, cancel := context.WithTimeout(ctx, max(grace, 0)+lifecycle.UndoLimit)
		if err := r.shutdown(limited, sb, grace); err != nil {
			r.log.Warn("a guest did not end in order", "sandbox", sb.ID, "err", err)
		}
		cancel()
	}
	return errors.Join(sb.endMachine(ctx), r.hold.Drop(ctx, netName(sb.ID)))
}

func (r *Runtime) shutdown(ctx context.Context, sb *sandbox, grace time.Duration) error {
	c, err := r.session(ctx, sb)
	if err != nil {
		return err
	}
	if grace > 0 && sb.IsPaused() { // to hear that it is asked
		if err := r.thaw(ctx, sb); err != nil {
			return err
		}
	}
	return c.Shutdown(ctx, grace)
}

// Start runs a stopped sandbox again on its disk.
func (r *Runtime) Start(ctx context.Context, id dsec.SandboxID) ([]dsec.Step, error) {
	const op = "start sandbox"
	sb, err := r.boxes.Acquire(ctx, op, id)
	if err != nil {
		return nil, err
	}
	defer sb.Leave()
	switch sb.GetPhase() {
	case tier.Running:
		return nil, nil
	case tier.Ended: // starting acknowledges the end as stopping does
		if err := r.halt(ctx, sb, 0); err != nil {
			return nil, tier.Wrap(op, id, err)
		}
	}
	select {
	case r.slots <- struct{}{}:
		defer func() { <-r.slots }()
	case <-ctx.Done():
		return nil, dsec.E(dsec.ClassOf(ctx.Err()), op, string(id), context.Cause(ctx))
	}
	was := sb.record()
	if p := sb.GetPhase(); was == nil || p != tier.Stopped {
		return nil, dsec.Errorf(dsec.SandboxGone, op, string(id), "the sandbox is being removed")
	}
	rec := *was
	rec.Stopped, rec.Begun, rec.Starts, rec.CPU, rec.Throttled = false, time.Now().UTC(), rec.Starts+1, 0, 0
	b := &build{r: r, sb: sb, rec: &rec}
	defer b.close()
	sb.beginMaking()
	took, err := lifecycle.Run(ctx, "microvm.start", append([]lifecycle.Step{b.restate()}, b.begin()...)...)
	if err != nil {
		sb.SetPhase(tier.Stopped)
		return took, tier.Wrap(op, id, err)
	}
	return took, nil
}

// restate writes down that the sandbox is being started, and back.
func (b *build) restate() lifecycle.Step {
	was := b.sb.record()
	set := func(rec *record) error {
		if err := writeRecord(b.r.dir(b.sb.ID), rec); err != nil {
			return dsec.E(dsec.Internal, "write state of sandbox", string(b.sb.ID), err)
		}
		b.setRecord(rec)
		return nil
	}
	return lifecycle.Step{Name: "state", Do: func(ctx context.Context) error {
		if err := b.r.endDisk(ctx, b.sb); err != nil {
			return err
		}
		return set(b.rec)
	}, Undo: func(context.Context) error { return set(was) }}
}

// sample reads what a sandbox uses, or used before it stopped. What its machine has of this
// one's memory and processors is measured here; the rest is what the guest says.
func (r *Runtime) sample(ctx context.Context, sb *sandbox) (runtime.Stats, error) {
	sb.Mu.Lock()
	g, rec, m, p := sb.group, sb.rec, sb.machine, sb.Phase
	sb.Mu.Unlock()
	var s runtime.Stats
	if rec == nil {
		return s, dsec.Errorf(dsec.SandboxGone, "sample sandbox", string(sb.ID), "the sandbox has ended")
	}
	if rec.Last != nil {
		s = *rec.Last
	}
	l := rec.Request.Spec.Limits
	s.MemoryLimit, s.PidsLimit, s.DiskLimit = l.Memory, l.Pids, l.Disk
	if m != nil && p == tier.Running {
		if err := r.sampleMachine(ctx, sb, &s); err != nil {
			return s, err
		}
	}
	if g != nil {
		c, err := g.Stats()
		if err != nil {
			return s, err
		}
		s.CPU, s.Throttled = rec.CPU+c.CPU, rec.Throttled+c.Throttled
	}
	return s, nil
}

func (r *Runtime) sampleMachine(ctx context.Context, sb *sandbox, s *runtime.Stats) error {
	ctx, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	c, err := r.session(ctx, sb)
	if err != nil {
		return err
	}
	sb.Mu.Lock()
	m := sb.machine
	sb.Mu.Unlock()
	if m == nil {
		return dsec.Errorf(dsec.SandboxGone, "sample sandbox", string(sb.ID), "the sandbox has ended")
	}
	g, err := c.Stats(ctx)
	if err != nil {
		return err
	}
	if s.HostMemory, err = m.Memory(); err != nil {
		return err
	}
	s.Memory, s.MemoryPeak, s.Disk = g.Memory, max(s.MemoryPeak, g.MemoryPeak), g.Disk
	s.Pids, s.PidsPeak, s.PidsDenied, s.OOMKills = g.Pids, g.PidsPeak, g.PidsDenied, g.OOMKills
	return nil
}

// Stats samples a sandbox; of a stopped one, what it had used.
func (r *Runtime) Stats(ctx context.Context, id dsec.SandboxID) (runtime.Stats, error) {
	const op = "sample sandbox"
	sb, err := r.boxes.FindInside(op, id)
	if err != nil {
		return runtime.Stats{}, err
	}
	s, err := r.sample(ctx, sb)
	return s, tier.Wrap(op, id, r.explain(op, sb, err))
}

package container

import (
	"context"
	"errors"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/diskpool"
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
	undo := sb.AnnounceRemoval()
	if err := sb.Enter(ctx, op); err != nil {
		undo()
		return err
	}
	defer sb.Leave()
	if !r.boxes.Current(sb) {
		return nil // another call destroyed it
	}
	sb.SetPhase(tier.Removing)
	sb.services.Close()
	// Once begun it is finished: a half-destroyed sandbox serves nobody.
	dctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), lifecycle.UndoLimit)
	defer cancel()
	if err := r.remove(dctx, sb); err != nil {
		return r.wrap(op, id, err)
	}
	return nil
}

// remove is all the undos of creation, by name. The state goes last, when
// nothing else is left, and only then the uid range is free.
func (r *Runtime) remove(ctx context.Context, sb *sandbox) error {
	id := string(sb.ID)
	rec, group := sb.record(), id
	if rec != nil {
		group = rec.group()
	}
	errs := []error{r.closeDiskShell(ctx, sb), r.hold.RemoveSandbox(ctx, id)}
	if group != id { // a creation that was killed before Enter
		errs = append(errs, r.hold.RemoveSandbox(ctx, group))
	}
	sb.closeRoot()
	r.unwitness(ctx, sb.ID)
	errs = append(errs, r.groups.Remove(ctx, group))
	if rec != nil && errors.Join(errs...) == nil {
		errs = append(errs, r.mac.remove(rec.AppArmor))
	}
	r.mounts.Unuse(id)
	errs = append(errs, r.disks.Remove(ctx, id))
	if err := errors.Join(errs...); err != nil {
		return err
	}
	if err := r.removeState(sb.ID); err != nil {
		return err
	}
	if rec != nil {
		r.uids.Give(rec.UID, sb.ID)
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
	if err := r.killMoving(sb); err != nil {
		return r.wrap(op, id, err)
	}
	if err := r.thaw(ctx, sb); err != nil {
		return r.wrap(op, id, err)
	}
	if grace > 0 && sb.GetPhase() == tier.Running {
		r.ask(ctx, sb, grace)
	}
	if err := ctx.Err(); err != nil {
		return dsec.E(dsec.ClassOf(err), op, string(id), context.Cause(ctx))
	}
	sctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), lifecycle.UndoLimit)
	defer cancel()
	return r.wrap(op, id, r.halt(sctx, sb))
}

// ask signals the main process and waits for its end; that it does not come is
// no error.
func (r *Runtime) ask(ctx context.Context, sb *sandbox, grace time.Duration) {
	p, err := r.hold.Process(ctx, string(sb.ID), mainID)
	if err != nil {
		return
	}
	sb.Mu.Lock()
	sb.Stopping = true // the end of the main process is what was asked for
	sb.Mu.Unlock()
	gctx, cancel := context.WithTimeout(ctx, grace)
	defer cancel()
	if err := p.Signal(gctx, signalOf(sb.record().Request.Layers.Config.StopSignal)); err != nil {
		return
	}
	_, _ = p.Wait(gctx)
}

// halt ends every process and keeps the disk, and what its commands left to be
// read. The group goes: it costs more memory than anything else.
func (r *Runtime) halt(ctx context.Context, sb *sandbox) error {
	id := string(sb.ID)
	sb.Mu.Lock()
	sb.Stopping = true
	sb.Mu.Unlock()
	sb.services.Close()
	if err := r.hold.KillSandbox(ctx, id); err != nil {
		return err
	}
	sb.closeRoot()
	r.unwitness(ctx, sb.ID)
	last, err := r.sample(ctx, sb)
	if err != nil {
		r.log.Warn("sample a sandbox at its end", "sandbox", id, "err", err)
	}
	rec := *sb.record()
	if err := r.groups.Remove(ctx, rec.group()); err != nil {
		return err
	}
	if err := r.mac.remove(rec.AppArmor); err != nil {
		return err
	}
	r.mounts.Unuse(id)
	rec.Stopped, rec.Shell, rec.Last = true, "", &last
	if err := writeRecord(r.dir(sb.ID), &rec); err != nil {
		return dsec.E(dsec.Internal, "write state of sandbox", id, err)
	}
	r.ends.Acknowledge(sb.ID)
	sb.Mu.Lock()
	defer sb.Mu.Unlock()
	sb.rec, sb.group, sb.Phase, sb.exit, sb.Paused, sb.Stopping, sb.moving = &rec, nil, tier.Stopped, nil, false, false, false
	return nil
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
		if err := r.halt(ctx, sb); err != nil {
			return nil, r.wrap(op, id, err)
		}
	}
	rec := *sb.record()
	rec.Stopped, rec.Begun, rec.Starts, rec.Bound, rec.Services = false, time.Now().UTC(), rec.Starts+1, nil, nil
	rec.arrive() // a start finishes a move
	b := &build{r: r, sb: sb, rec: &rec}
	defer b.close()
	sb.beginMaking()
	took, err := lifecycle.Run(ctx, "container.start", append([]lifecycle.Step{b.restate(), b.reopen()}, b.begin()...)...)
	if err != nil {
		sb.SetPhase(tier.Stopped)
		return took, r.wrap(op, id, err)
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
		b.sb.Mu.Lock()
		defer b.sb.Mu.Unlock()
		b.sb.rec = rec
		return nil
	}
	return lifecycle.Step{Name: "state", Do: func(ctx context.Context) error {
		// The commands of the run before are forgotten here, not at the stop, so that they could be read.
		if err := errors.Join(b.r.closeDiskShell(ctx, b.sb), b.r.hold.RemoveSandbox(ctx, string(b.sb.ID))); err != nil {
			return err
		}
		if err := b.setProfile(); err != nil {
			return err
		}
		return set(b.rec)
	}, Undo: func(context.Context) error { return set(was) }}
}

func (b *build) reopen() lifecycle.Step {
	return lifecycle.Step{Name: "disk", Do: func(ctx context.Context) (err error) {
		if b.dir, err = b.r.disks.Open(ctx, string(b.sb.ID)); err != nil {
			return err
		}
		if err = b.makeRoom(ctx); err == nil {
			err = b.prepareDir()
		}
		if err != nil {
			err = errors.Join(err, b.takeRoom(context.WithoutCancel(ctx)))
		}
		return err
	}, Undo: b.takeRoom}
}

// startRoom is for what a start writes on a disk: overlayfs's own directory, and
// what the sandbox finds about itself.
const startRoom = 1 << 20

// makeRoom lets a sandbox that has filled its disk start, to be emptied: until
// takeRoom, which a kill may have prevented the last time, its limit is higher.
func (b *build) makeRoom(ctx context.Context) error {
	id, limit := string(b.sb.ID), b.rec.Request.Spec.Limits.Disk
	if limit == 0 || !diskpool.Shrinks(b.r.disks) { // then what is removed first has to be enough
		return nil
	}
	u, err := b.r.disks.Usage(ctx, id)
	if err != nil {
		return err
	}
	if b.hasRoom = u.Used+startRoom > limit; b.hasRoom {
		limit += startRoom
	} else if u.Limit <= limit {
		return nil
	}
	return b.r.disks.Resize(ctx, id, limit)
}

func (b *build) takeRoom(ctx context.Context) error {
	if !b.hasRoom {
		return nil
	}
	b.hasRoom = false
	return b.r.disks.Resize(ctx, string(b.sb.ID), b.rec.Request.Spec.Limits.Disk)
}

// sample reads what a sandbox uses, or used before it stopped.
func (r *Runtime) sample(ctx context.Context, sb *sandbox) (runtime.Stats, error) {
	sb.Mu.Lock()
	g, rec := sb.group, sb.rec
	sb.Mu.Unlock()
	var s runtime.Stats
	if rec != nil && rec.Last != nil {
		s = *rec.Last
	}
	if g != nil {
		c, err := g.Stats()
		if err != nil {
			return s, err
		}
		s = tier.Usage(c)
	}
	u, err := r.disks.Usage(ctx, string(sb.ID))
	s.Disk, s.DiskLimit = u.Used, u.Limit
	return s, err
}

// Stats samples a sandbox; of a stopped one, what it had used.
func (r *Runtime) Stats(ctx context.Context, id dsec.SandboxID) (runtime.Stats, error) {
	const op = "sample sandbox"
	sb, err := r.boxes.FindInside(op, id)
	if err != nil {
		return runtime.Stats{}, err
	}
	s, err := r.sample(ctx, sb)
	return s, r.wrap(op, id, err)
}

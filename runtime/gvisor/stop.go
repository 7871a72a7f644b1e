package gvisor

import (
	"context"
	"errors"
	"os"
	"strings"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/lifecycle"
	"github.com/opendsec/dsec/process"
	"github.com/opendsec/dsec/runtime"
	"github.com/opendsec/dsec/runtime/gvisor/inside"
	"github.com/opendsec/dsec/runtime/tier"
)

// saveLimit is how long a sentry may take to write down what a sandbox wrote.
const saveLimit = 2 * time.Minute

// save ends what runs in an instance and has its upper layer written down.
func (r *Runtime) save(ctx context.Context, sb *sandbox, shell string, linked bool) error {
	const op = "save disk of sandbox"
	p, err := r.own(ctx, shell, sb.ID, ownPrefix+"save"+dsec.Random(8), inside.RoleSave, inside.Save{Runsc: runscOf(linked), File: placeDisk + "/" + upperFile})
	if err != nil {
		return err
	}
	defer r.releaseAfter(ctx, p)
	res, err := p.Wait(ctx)
	if err == nil && (res.Status != process.Exited || res.ExitCode != 0) {
		text := r.reason(ctx, p, nil)
		if strings.Contains(text, "no space left") || strings.Contains(text, "quota exceeded") {
			return dsec.Errorf(dsec.NoSpace, op, string(sb.ID), "%s", text)
		}
		err = errors.New(text)
	}
	return tier.Wrap(op, sb.ID, err)
}

// conclude ends every process of a sandbox and keeps its disk, as far as there is a
// sentry to ask. The turn is held.
func (r *Runtime) conclude(ctx context.Context, sb *sandbox) {
	if sb.saved {
		return
	}
	if err := r.endCommands(ctx, sb); err != nil {
		r.log.Warn("end the commands of a sandbox", "sandbox", sb.ID, "err", err)
	}
	if err := r.save(ctx, sb, name(sb.ID), sb.record().Request.Spec.HasLink()); err != nil {
		r.log.Warn("what a sandbox wrote since its start is lost", "sandbox", sb.ID, "err", err)
	}
	sb.saved = true
	if err := r.hold.KillSandbox(ctx, name(sb.ID)); err != nil {
		r.log.Warn("end a sandbox", "sandbox", sb.ID, "err", err)
	}
}

// endCommands kills them as what was asked for, before they end with what is around them.
func (r *Runtime) endCommands(ctx context.Context, sb *sandbox) error {
	known, err := r.hold.List(ctx)
	if err != nil {
		return err
	}
	var errs []error
	for _, s := range known {
		if s.ID != name(sb.ID) {
			continue
		}
		for _, e := range s.Execs {
			if e.Ended || isOwn(e.Spec.ID) {
				continue
			}
			p, err := r.hold.Process(ctx, s.ID, e.Spec.ID)
			if err == nil {
				err = p.Kill(ctx)
			}
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
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
	if sb.GetPhase() == tier.Running && sb.IsPaused() {
		if err := r.goOn(ctx, sb); err != nil { // then there is no sentry to ask for anything
			r.log.Warn("what a sandbox wrote since its start is lost", "sandbox", id, "err", err)
			sb.saved = true
		}
	}
	if grace > 0 && sb.GetPhase() == tier.Running {
		r.ask(ctx, sb, grace)
	}
	if err := ctx.Err(); err != nil {
		return dsec.E(dsec.ClassOf(err), op, string(id), context.Cause(ctx))
	}
	sctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), saveLimit)
	defer cancel()
	return tier.Wrap(op, id, r.halt(sctx, sb))
}

// ask signals the main process and waits for its end; that it does not come is no error.
func (r *Runtime) ask(ctx context.Context, sb *sandbox, grace time.Duration) {
	p, err := r.hold.Process(ctx, name(sb.ID), mainID)
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

// halt ends every process and keeps the disk, and what its commands left to be read.
func (r *Runtime) halt(ctx context.Context, sb *sandbox) error {
	sb.Mu.Lock()
	sb.Stopping = true
	sb.Mu.Unlock()
	sb.services.Close()
	r.conclude(ctx, sb)
	if err := r.hold.KillSandbox(ctx, name(sb.ID)); err != nil {
		return err
	}
	last, err := r.sample(ctx, sb)
	if err != nil {
		r.log.Warn("sample a sandbox at its end", "sandbox", sb.ID, "err", err)
	}
	last.Pids = 0
	if err := r.groups.Remove(ctx, name(sb.ID)); err != nil {
		return err
	}
	r.images.Unuse(name(sb.ID))
	rec := *sb.record()
	rec.Stopped, rec.Still, rec.Last = true, false, &last
	if err := writeRecord(r.dir(sb.ID), &rec); err != nil {
		return dsec.E(dsec.Internal, "write state of sandbox", string(sb.ID), err)
	}
	r.ends.Acknowledge(sb.ID)
	sb.Mu.Lock()
	defer sb.Mu.Unlock()
	sb.rec, sb.group, sb.Phase, sb.exit, sb.Paused, sb.Stopping = &rec, nil, tier.Stopped, nil, false, false
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
			return nil, tier.Wrap(op, id, err)
		}
	}
	if err := r.closeDisk(ctx, sb, true); err != nil {
		return nil, tier.Wrap(op, id, err)
	}
	rec := *sb.record()
	rec.Stopped, rec.Begun, rec.Starts = false, time.Now().UTC(), rec.Starts+1
	b := &build{r: r, sb: sb, rec: &rec, name: name(id)}
	defer b.close()
	sb.beginMaking()
	took, err := lifecycle.Run(ctx, "gvisor.start", append([]lifecycle.Step{b.restate(), b.reopen()}, b.begin()...)...)
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
		b.sb.Mu.Lock()
		defer b.sb.Mu.Unlock()
		b.sb.rec = rec
		return nil
	}
	return lifecycle.Step{Name: "state", Do: func(ctx context.Context) error {
		// The commands of the run before are forgotten here, not at the stop, so that they could be read.
		if err := b.r.hold.RemoveSandbox(ctx, b.name); err != nil {
			return err
		}
		return set(b.rec)
	}, Undo: func(context.Context) error { return set(was) }}
}

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
	return tier.Wrap(op, id, r.remove(dctx, sb))
}

// remove is all the undos of creation, by name. The state goes last, when nothing else is
// left, and only then the uid range is free.
func (r *Runtime) remove(ctx context.Context, sb *sandbox) error {
	id, rec := name(sb.ID), sb.record()
	errs := []error{r.closeDisk(ctx, sb, false), r.hold.RemoveSandbox(ctx, id), r.groups.Remove(ctx, id)}
	r.images.Unuse(id)
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

// sample reads what a sandbox uses, or used before it stopped.
func (r *Runtime) sample(ctx context.Context, sb *sandbox) (runtime.Stats, error) {
	sb.Mu.Lock()
	g, rec := sb.group, sb.rec
	sb.Mu.Unlock()
	var s runtime.Stats
	if rec == nil {
		return s, dsec.E(dsec.SandboxGone, "sample sandbox", string(sb.ID), os.ErrNotExist)
	}
	if rec.Last != nil {
		s = *rec.Last
	}
	limits := rec.Request.Spec.LimitsIn(0)
	if g != nil {
		c, err := g.Stats()
		if err != nil {
			return s, err
		}
		s = runtime.Stats{CPU: c.CPU, Throttled: c.Throttled, Memory: c.Memory, MemoryPeak: c.MemoryPeak, OOMKills: c.OOMKills}
	}
	s.MemoryLimit, s.PidsLimit, s.DiskLimit = limits.Memory, limits.Pids, limits.Disk
	u, err := r.disks.Usage(ctx, name(sb.ID))
	s.Disk = u.Used
	return s, err
}

// Stats samples a sandbox; of a stopped one, what it had used. Memory is the sentry's too;
// processes are those inside, its PID 1 and helpers of ours among them.
func (r *Runtime) Stats(ctx context.Context, id dsec.SandboxID) (runtime.Stats, error) {
	const op = "sample sandbox"
	sb, err := r.boxes.FindInside(op, id)
	if err != nil {
		return runtime.Stats{}, err
	}
	s, err := r.sample(ctx, sb)
	if err == nil && sb.GetPhase() == tier.Running && !sb.IsPaused() {
		s.Pids, err = r.processes(ctx, sb)
	}
	return s, tier.Wrap(op, id, err)
}

// processes counts those inside.
func (r *Runtime) processes(ctx context.Context, sb *sandbox) (n int64, err error) {
	fs, err := r.asRoot(ctx, sb)
	if err != nil {
		return 0, err
	}
	list, err := fs.List(ctx, "/proc", 1)
	if err != nil {
		return 0, explain("sample sandbox", sb, err)
	}
	for _, i := range list {
		if strings.Trim(strings.TrimPrefix(i.Path, "/proc/"), "0123456789") == "" {
			n++
		}
	}
	return n, nil
}

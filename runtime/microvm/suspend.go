package microvm

import (
	"context"
	"errors"
	"os"
	"path/filepath"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/lifecycle"
	"github.com/opendsec/dsec/runtime"
	"github.com/opendsec/dsec/runtime/tier"
)

// memoryDir has the machine of a sandbox that is suspended.
const memoryDir = "memory"

func (r *Runtime) memory(id dsec.SandboxID) string { return filepath.Join(r.dir(id), memoryDir) }

// Suspend implements runtime.Suspender: the machine is written to disk and ended, and nothing of it
// is in memory until somebody needs it.
func (r *Runtime) Suspend(ctx context.Context, id dsec.SandboxID) error {
	const op = "suspend sandbox"
	sb, err := r.boxes.Acquire(ctx, op, id)
	if err != nil {
		return err
	}
	defer sb.Leave()
	if _, err := r.boxes.Live(op, id); err != nil {
		return err
	}
	if sb.isSuspended() {
		r.putAway(ctx, sb) // again, if something was left
		return nil
	}
	return tier.Wrap(op, id, r.explain(op, sb, r.suspend(ctx, sb)))
}

func (r *Runtime) suspend(ctx context.Context, sb *sandbox) error {
	sb.Mu.Lock()
	m := sb.machine
	sb.Mu.Unlock()
	if m == nil {
		return dsec.Errorf(dsec.SandboxGone, "suspend sandbox", string(sb.ID), "the sandbox has ended")
	}
	c, err := r.session(ctx, sb)
	if err != nil {
		return err
	}
	asked, cancel := context.WithTimeout(ctx, askTime)
	execs, err := c.List(asked)
	cancel()
	if err != nil {
		return err
	}
	last, err := r.sample(ctx, sb)
	if err != nil {
		return err
	}
	if err := r.freeze(ctx, sb, c, true); err != nil {
		return err
	}
	if err = os.RemoveAll(r.memory(sb.ID)); err == nil { // of one that was broken off
		err = m.Pause(ctx)
	}
	if err == nil {
		err = m.Snapshot(ctx, r.memory(sb.ID))
	}
	if err == nil {
		last.HostMemory = 0
		err = r.rewrite(sb, func(rec *record) {
			rec.Suspended, rec.Execs, rec.Lease, rec.Last, rec.CPU, rec.Throttled = true, execs, nil, &last, last.CPU, last.Throttled
		})
	}
	if err != nil { // it is left as it was
		late, cancel := context.WithTimeout(context.WithoutCancel(ctx), lifecycle.UndoLimit)
		defer cancel()
		return errors.Join(err, m.Resume(late), r.goOn(ctx, sb), os.RemoveAll(r.memory(sb.ID)))
	}
	sb.Mu.Lock()
	sb.suspended, sb.Paused = make(chan struct{}), true
	sb.Mu.Unlock()
	r.putAway(ctx, sb)
	return nil
}

// putAway ends what a suspended sandbox has in memory. What cannot be ended now is when it is
// suspended or removed again, or by the next process.
func (r *Runtime) putAway(ctx context.Context, sb *sandbox) {
	late, cancel := context.WithTimeout(context.WithoutCancel(ctx), lifecycle.UndoLimit)
	defer cancel()
	sb.services.Close()
	err := errors.Join(sb.endMachine(late), r.hold.Drop(late, netName(sb.ID)), r.groups.Remove(late, shared(sb.ID)))
	if err != nil {
		r.log.Warn("a suspended sandbox has something in memory", "sandbox", sb.ID, "err", err)
	}
	sb.Mu.Lock()
	defer sb.Mu.Unlock()
	sb.group = nil
}

func (sb *sandbox) isSuspended() bool {
	sb.Mu.Lock()
	defer sb.Mu.Unlock()
	return sb.suspended != nil
}

// bringBack brings the machine of a suspended sandbox back; what runs in it stays frozen until Resume.
func (r *Runtime) bringBack(ctx context.Context, sb *sandbox) error {
	const op = "bring back sandbox"
	if !sb.isSuspended() {
		return nil
	}
	if err := sb.Enter(ctx, op); err != nil {
		return err
	}
	defer sb.Leave()
	return r.bringBackInTurn(ctx, sb)
}

// bringBackInTurn is bringBack of who has the turn.
func (r *Runtime) bringBackInTurn(ctx context.Context, sb *sandbox) error {
	if !sb.isSuspended() {
		return nil
	}
	was := sb.record()
	if was == nil {
		return dsec.Errorf(dsec.SandboxGone, "bring back sandbox", string(sb.ID), "the sandbox has ended")
	}
	rec := *was
	b := &build{r: r, sb: sb, rec: &rec, from: r.memory(sb.ID), read: rec.Read}
	defer b.close()
	var steps []lifecycle.Step
	for _, s := range b.begin() {
		switch s.Name {
		case "machine":
			s.Do = b.restore
		case "resume", "root":
			continue
		case "main":
			// From here on it is what runs that counts: once the machine goes on, its memory on
			// disk and its disk are not of the same moment any more.
			s.Do = func(context.Context) error {
				rec.Suspended, rec.Execs = false, nil
				return writeRecord(r.dir(sb.ID), &rec)
			}
		}
		steps = append(steps, s)
	}
	if _, err := lifecycle.Run(ctx, "microvm.back", steps...); err != nil {
		return tier.Wrap("bring back sandbox", sb.ID, err)
	}
	sb.Mu.Lock()
	sb.rec = &rec
	close(sb.suspended)
	sb.suspended = nil
	m := sb.machine
	sb.Mu.Unlock()
	late, cancel := context.WithTimeout(context.WithoutCancel(ctx), greetTime+resumeTime)
	defer cancel()
	err := m.Resume(late)
	if err == nil {
		err = r.tell(late, sb, &rec, true)
	}
	r.watch(sb, m)
	if err != nil {
		r.end(sb, runtime.Exit{Cause: dsec.CauseInfraNodeLost, By: dsec.InducedByPlatform, Evidence: []string{"its machine was brought back from disk, and did not go on: " + err.Error()}})
		return tier.Wrap("bring back sandbox", sb.ID, err)
	}
	if err := os.RemoveAll(r.memory(sb.ID)); err != nil {
		r.log.Warn("remove the memory of a sandbox that goes on", "sandbox", sb.ID, "err", err)
	}
	return nil
}

// awake waits until a sandbox is not suspended.
func (sb *sandbox) awake(ctx context.Context) error {
	sb.Mu.Lock()
	suspended := sb.suspended
	sb.Mu.Unlock()
	if suspended == nil {
		return nil
	}
	select {
	case <-suspended:
		return nil
	case <-ctx.Done():
		return dsec.E(dsec.ClassOf(ctx.Err()), "wait for sandbox", string(sb.ID), context.Cause(ctx))
	}
}

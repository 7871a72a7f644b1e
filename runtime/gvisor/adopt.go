package gvisor

import (
	"context"
	"errors"
	"os"
	"strings"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/hold"
	"github.com/opendsec/dsec/internal/lifecycle"
	"github.com/opendsec/dsec/runtime"
	"github.com/opendsec/dsec/runtime/gvisor/inside"
	"github.com/opendsec/dsec/runtime/tier"
)

// adopt takes over what an earlier process left: sandboxes with a state file go on,
// whatever has no state file is removed.
func (r *Runtime) adopt(ctx context.Context) error {
	known, err := r.hold.List(ctx)
	if err != nil {
		return err
	}
	held := map[string]hold.SandboxInfo{}
	for _, s := range known {
		if strings.HasPrefix(s.ID, Prefix) {
			held[s.ID] = s
		}
	}
	entries, err := os.ReadDir(r.cfg.Dir)
	if err != nil {
		return dsec.E(dsec.Internal, "read state of sandboxes", r.cfg.Dir, err)
	}
	for _, e := range entries {
		id, _, err := dsec.ParseSandboxID(e.Name())
		if err != nil {
			continue // not one of them
		}
		err = r.adoptOne(ctx, id, held)
		switch dsec.ClassOf(err) {
		case "":
		case dsec.Unsupported, dsec.Unavailable, dsec.Canceled, dsec.Timeout: // of another version, or no hold to ask
			return err
		default:
			r.lose(id, err)
		}
	}
	return r.removeStrays(ctx, held)
}

// lose gives up a sandbox that cannot be taken over: one is not worth the node.
func (r *Runtime) lose(id dsec.SandboxID, err error) {
	r.log.Error("sandbox of an earlier process cannot be taken over", "sandbox", id, "err", err)
	sb := r.boxes.Reserve(id)
	sb.SetPhase(tier.Running)
	r.end(sb, runtime.Exit{Cause: dsec.CauseInfraNodeLost, By: dsec.InducedByPlatform,
		Evidence: []string{"the node agent restarted and could not take the sandbox over: " + err.Error()}})
}

func (r *Runtime) adoptOne(ctx context.Context, id dsec.SandboxID, held map[string]hold.SandboxInfo) error {
	rec, err := readRecord(r.dir(id), id)
	if errors.Is(err, os.ErrNotExist) { // killed before the first step was done
		return r.removeState(id)
	}
	if errors.Is(err, dsec.Corrupt.Err()) {
		r.log.Error("remove a sandbox whose state is broken", "sandbox", id, "err", err)
		return r.remove(ctx, r.boxes.Reserve(id))
	}
	if err != nil {
		return err
	}
	if err := r.uids.Adopt(rec.UID, id); err != nil {
		return err
	}
	sb := r.boxes.Reserve(id)
	sb.rec = rec
	info, isHeld := held[name(id)]
	disk, hasDisk := held[name(id)+diskSuffix]
	if hasDisk && disk.Entered && !disk.Ended && rec.Stopped {
		sb.hasDisk, sb.Phase = true, tier.Stopped
		r.images.hold(name(id)+diskSuffix, rec.Image)
		return nil
	}
	switch {
	case rec.Stopped:
		sb.Phase = tier.Stopped
		return r.groups.Remove(ctx, name(id)) // of a stop that was killed half-way
	case isHeld && info.Entered && complete(rec, info):
		return r.adoptRunning(ctx, sb, info)
	case !isHeld && rec.Begun.Before(r.hold.Info().Started):
		sb.Phase, sb.saved = tier.Running, true // by nobody: there is no sentry to ask
		r.end(sb, runtime.Exit{Cause: dsec.CauseInfraNodeLost, By: dsec.InducedByPlatform,
			Evidence: []string{"the process that held the sandbox (dsec-hold) ended"}})
		return nil
	case rec.Starts > 1:
		return r.undoStart(ctx, sb)
	}
	r.log.Info("undo a half-made sandbox", "sandbox", id)
	return r.remove(ctx, sb)
}

// complete reports whether the creation had come to its end, or far enough.
func complete(rec *record, info hold.SandboxInfo) bool {
	want := runID
	if len(rec.Request.Spec.Command) > 0 {
		want = mainID
	}
	for _, e := range info.Execs {
		if e.Spec.ID == want {
			return true
		}
	}
	return false
}

func (r *Runtime) adoptRunning(ctx context.Context, sb *sandbox, info hold.SandboxInfo) error {
	g, err := r.groups.Group(name(sb.ID))
	if err != nil && !info.Ended { // a stop that was killed half-way has removed it
		return err
	}
	sb.group, sb.Phase = g, tier.Running
	r.images.hold(name(sb.ID), sb.rec.Image)
	if info.Ended {
		sb.saved = true
		if info.Asked { // a stop, or the end after that of the main process
			if r.adoptEnds(ctx, sb, info); sb.GetPhase() == tier.Ended {
				return nil
			}
			return r.halt(ctx, sb)
		}
		r.end(sb, r.sentryEnd(sb, "the first process of its shell is gone"))
		return nil
	}
	if r.cfg.Network != nil && sb.rec.Request.Spec.HasLink() {
		if err := r.cfg.Network.Restore(ctx, sb.ID, sb.rec.policy()); err != nil { // what is in force stays so
			r.log.Warn("names of a running sandbox cannot be asked for", "sandbox", sb.ID, "err", err)
		}
	}
	if r.adoptEnds(ctx, sb, info); sb.GetPhase() == tier.Ended {
		return nil
	}
	if sb.Paused = sb.rec.Still; sb.Paused { // an earlier process may have died before it was, or after it was no more
		if err := r.pauseAgain(ctx, sb, info); err != nil {
			return dsec.E(dsec.Internal, "pause sandbox", string(sb.ID), err) // which costs one sandbox, whatever it is
		}
	}
	if info.Held == sb.Paused {
		return nil
	}
	return r.hold.HoldClock(ctx, name(sb.ID), sb.Paused)
}

// pauseAgain has a sandbox be paused, after what an earlier process has had it told.
func (r *Runtime) pauseAgain(ctx context.Context, sb *sandbox, info hold.SandboxInfo) error {
	ctx, cancel := context.WithTimeout(ctx, tellLimit)
	defer cancel()
	for _, e := range info.Execs {
		if e.Ended || !strings.HasPrefix(e.Spec.ID, tellPrefix) {
			continue
		}
		p, err := r.hold.Process(ctx, name(sb.ID), e.Spec.ID)
		if err != nil {
			return err
		}
		if _, err := p.Wait(ctx); err != nil {
			return err
		}
	}
	return r.tell(ctx, sb, inside.RolePause)
}

// adoptEnds looks for the end of a command that is the end of its sandbox.
func (r *Runtime) adoptEnds(ctx context.Context, sb *sandbox, info hold.SandboxInfo) {
	for _, e := range info.Execs {
		switch {
		case !e.Ended:
		case e.Spec.ID == runID && !info.Asked:
			sb.saved = true
			r.end(sb, r.sentryEnd(sb, "the sentry is gone"))
		case !isOwn(e.Spec.ID):
			r.execEnded(ctx, sb, e.Spec.ID, e.Result)
		}
	}
}

// undoStart brings a sandbox whose start was killed half-way back to stopped.
func (r *Runtime) undoStart(ctx context.Context, sb *sandbox) error {
	r.log.Info("undo a half-made start", "sandbox", sb.ID)
	if err := errors.Join(r.hold.RemoveSandbox(ctx, name(sb.ID)), r.groups.Remove(ctx, name(sb.ID))); err != nil {
		return err
	}
	rec := *sb.rec
	rec.Stopped = true
	if err := writeRecord(r.dir(sb.ID), &rec); err != nil {
		return dsec.E(dsec.Internal, "write state of sandbox", string(sb.ID), err)
	}
	sb.rec, sb.Phase = &rec, tier.Stopped
	return nil
}

// removeStrays removes what carries the name of a sandbox that has no state.
func (r *Runtime) removeStrays(ctx context.Context, held map[string]hold.SandboxInfo) error {
	ctx, cancel := context.WithTimeout(ctx, 6*lifecycle.UndoLimit)
	defer cancel()
	groups, err := r.groups.List()
	if err != nil {
		return err
	}
	disks, err := r.disks.List(ctx)
	if err != nil {
		return err
	}
	var errs []error
	for shell := range held {
		if !r.isKnown(shell) {
			errs = append(errs, r.hold.RemoveSandbox(ctx, shell))
		}
	}
	for _, g := range groups {
		if strings.HasPrefix(g, Prefix) && !r.isKnown(g) {
			errs = append(errs, r.groups.Remove(ctx, g))
		}
	}
	for _, d := range disks {
		if strings.HasPrefix(d, Prefix) && !r.isKnown(d) {
			errs = append(errs, r.disks.Remove(ctx, d))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return dsec.E(dsec.Internal, "remove strays of sandboxes", r.cfg.Dir, err)
	}
	return nil
}

// isKnown says whether a name is of a sandbox there is. An instance for files that nobody
// adopted is not.
func (r *Runtime) isKnown(n string) bool {
	n = strings.TrimPrefix(n, Prefix)
	id, isDisk := strings.CutSuffix(n, diskSuffix)
	sb, ok := r.boxes.Get(dsec.SandboxID(id))
	return ok && (!isDisk || sb.hasDisk)
}

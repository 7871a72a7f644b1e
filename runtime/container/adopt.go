package container

import (
	"context"
	"errors"
	"os"
	"strings"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/hold"
	"github.com/opendsec/dsec/internal/lifecycle"
	"github.com/opendsec/dsec/runtime"
	"github.com/opendsec/dsec/runtime/tier"
)

// adopt takes over what an earlier process left: sandboxes with a state file
// go on, whatever has no state file is removed.
func (r *Runtime) adopt(ctx context.Context) error {
	known, err := r.hold.List(ctx)
	if err != nil {
		return err
	}
	held := map[string]hold.SandboxInfo{}
	for _, s := range known {
		held[s.ID] = s
	}
	entries, err := os.ReadDir(r.cfg.Dir)
	if err != nil {
		return dsec.E(dsec.Internal, "read state of sandboxes", r.cfg.Dir, err)
	}
	for _, e := range entries {
		id, _, err := dsec.ParseSandboxID(e.Name())
		if err != nil {
			continue // not ours
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
		// Killed in its first step, or the machine lost power, and then its disk is garbage too.
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
	info, isHeld := held[string(id)]
	switch {
	case rec.Stopped:
		sb.Phase = tier.Stopped
		return r.groups.Remove(ctx, rec.group()) // of a stop that was killed half-way, or of its file service
	case isHeld && info.Entered && r.complete(rec, info):
		return r.adoptRunning(ctx, sb, info)
	case !isHeld && rec.Begun.Before(r.hold.Info().Started):
		sb.Phase = tier.Running
		r.end(sb, runtime.Exit{Cause: dsec.CauseInfraNodeLost, By: dsec.InducedByPlatform,
			Evidence: []string{"the process that held the sandbox (dsec-hold) ended"}})
		return nil
	case rec.Starts > 1:
		return r.undoStart(ctx, sb)
	}
	r.log.Info("undo a half-made sandbox", "sandbox", id)
	return r.remove(ctx, sb)
}

// complete reports whether the creation had come to its end.
func (r *Runtime) complete(rec *record, info hold.SandboxInfo) bool {
	if len(rec.Request.Spec.Phases) > 0 && rec.Settled != rec.Starts {
		return false
	}
	if len(rec.Request.Spec.Command) == 0 {
		return true
	}
	for _, e := range info.Execs {
		if e.Spec.ID == mainID {
			return true
		}
	}
	return false
}

func (r *Runtime) adoptRunning(ctx context.Context, sb *sandbox, info hold.SandboxInfo) error {
	id := string(sb.ID)
	g, err := r.groups.Group(sb.rec.group())
	if err != nil && !info.Ended { // a stop that was killed half-way has removed it
		return err
	}
	sb.group, sb.Phase = g, tier.Running
	if info.Ended && info.Asked {
		return r.adoptKilled(ctx, sb, info)
	}
	if err := r.reloadProfile(ctx, sb.rec); err != nil {
		return err
	}
	if err := r.mounts.Use(ctx, id, sb.rec.Request.Layers.Layers); err != nil {
		// The sandbox lives on its own copies of the mounts; only new sandboxes need ours.
		r.log.Warn("layer mounts of a running sandbox", "sandbox", id, "err", err)
	}
	if info.Ended {
		r.end(sb, r.initEnd(sb, info.Signal))
		return nil
	}
	r.witnessAdopted(ctx, sb.rec, info.PID)
	if r.cfg.Network != nil && sb.rec.Request.Spec.HasLink() {
		if err := r.cfg.Network.Restore(ctx, sb.ID, sb.rec.policy()); err != nil { // what is in force stays so
			r.log.Warn("names of a running sandbox cannot be asked for", "sandbox", id, "err", err)
		}
	}
	if r.adoptEnds(ctx, sb, info); sb.Phase == tier.Ended {
		return nil
	}
	if sb.rec.Still { // the earlier process died between freezing and thawing
		if err := r.goOn(ctx, sb, g); err != nil {
			return err
		}
		info.Held = false
	}
	if err := r.adoptPhase(ctx, sb, g); err != nil {
		return err
	}
	if sb.Paused, err = g.Frozen(); err != nil {
		return err
	}
	return r.adoptClock(ctx, sb, info)
}

// adoptEnds looks for the end of a command that is the end of its sandbox.
func (r *Runtime) adoptEnds(ctx context.Context, sb *sandbox, info hold.SandboxInfo) {
	for _, e := range info.Execs {
		if e.Ended {
			r.execEnded(ctx, sb, e.Spec.ID, e.Result)
		}
	}
}

// adoptClock makes the clock of the commands agree with the freezer, where an
// earlier process died between the two.
func (r *Runtime) adoptClock(ctx context.Context, sb *sandbox, info hold.SandboxInfo) error {
	if info.Held == sb.Paused {
		return nil
	}
	return r.hold.HoldClock(ctx, string(sb.ID), sb.Paused)
}

// adoptKilled continues what the earlier process had begun when it killed the
// sandbox: a stop, or the end after that of the main process.
func (r *Runtime) adoptKilled(ctx context.Context, sb *sandbox, info hold.SandboxInfo) error {
	if r.adoptEnds(ctx, sb, info); sb.Phase == tier.Ended {
		return nil
	}
	return r.halt(ctx, sb)
}

// undoStart brings a sandbox whose start was killed half-way back to stopped.
func (r *Runtime) undoStart(ctx context.Context, sb *sandbox) error {
	r.log.Info("undo a half-made start", "sandbox", sb.ID)
	id := string(sb.ID)
	if err := errors.Join(r.hold.RemoveSandbox(ctx, id), r.groups.Remove(ctx, sb.rec.group())); err != nil {
		return err
	}
	rec := *sb.rec
	rec.Stopped = true
	if err := writeRecord(r.dir(sb.ID), &rec); err != nil {
		return dsec.E(dsec.Internal, "write state of sandbox", id, err)
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
	for name := range held {
		if r.isForeign(name) {
			continue
		}
		if !r.isOurs(name) || strings.HasSuffix(name, diskSuffix) {
			errs = append(errs, r.hold.RemoveSandbox(ctx, name))
		}
	}
	mine := r.groupNames()
	for _, name := range groups {
		if !mine[name] && !r.isForeign(name) {
			errs = append(errs, r.groups.Remove(ctx, name))
		}
	}
	for _, name := range disks {
		if !r.isOurs(name) && !r.isForeign(name) {
			errs = append(errs, r.disks.Remove(ctx, name))
		}
	}
	errs = append(errs, r.removeStrayProfiles())
	if err := errors.Join(errs...); err != nil {
		return dsec.E(dsec.Internal, "remove strays of sandboxes", r.cfg.Dir, err)
	}
	return nil
}

// groupNames are the control groups of all sandboxes there are.
func (r *Runtime) groupNames() map[string]bool {
	names := map[string]bool{}
	for _, sb := range r.boxes.All() {
		if rec := sb.record(); rec != nil {
			names[rec.group()] = true
		} else {
			names[string(sb.ID)] = true
		}
	}
	return names
}

func (r *Runtime) isForeign(name string) bool { return r.cfg.Foreign != nil && r.cfg.Foreign(name) }

func (r *Runtime) isOurs(name string) bool {
	_, ok := r.boxes.Get(dsec.SandboxID(strings.TrimSuffix(name, diskSuffix)))
	return ok
}

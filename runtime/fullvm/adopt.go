package fullvm

import (
	"context"
	"errors"
	"os"
	"strings"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/lifecycle"
	"github.com/opendsec/dsec/runtime"
	"github.com/opendsec/dsec/runtime/tier"
)

// adopt takes over what an earlier process left.
func (r *Runtime) adopt(ctx context.Context) error {
	entries, err := os.ReadDir(r.cfg.Dir)
	if err != nil {
		return dsec.E(dsec.Internal, "read state of sandboxes", r.cfg.Dir, err)
	}
	for _, e := range entries {
		id, _, err := dsec.ParseSandboxID(e.Name())
		if err != nil {
			continue // not ours
		}
		err = r.adoptOne(ctx, id)
		switch dsec.ClassOf(err) {
		case "":
		case dsec.Unsupported, dsec.Unavailable, dsec.Canceled, dsec.Timeout, dsec.Conflict: // of another version, or nobody to ask
			return err
		default:
			r.lose(id, err)
		}
	}
	return r.removeStrays(ctx)
}

// lose gives up a sandbox that cannot be taken over: one is not worth the node.
func (r *Runtime) lose(id dsec.SandboxID, err error) {
	r.log.Error("sandbox of an earlier process cannot be taken over", "sandbox", id, "err", err)
	sb := r.boxes.Reserve(id)
	sb.SetPhase(tier.Running)
	r.end(sb, runtime.Exit{Cause: dsec.CauseInfraNodeLost, By: dsec.InducedByPlatform,
		Evidence: []string{"the node agent restarted and could not take the sandbox over: " + err.Error()}})
}

func (r *Runtime) adoptOne(ctx context.Context, id dsec.SandboxID) error {
	rec, err := r.readRecord(id)
	sb := r.boxes.Reserve(id)
	if errors.Is(err, os.ErrNotExist) || dsec.ClassOf(err) == dsec.Corrupt { // killed before its first step was done
		return r.remove(ctx, sb)
	}
	if err != nil {
		return err
	}
	sb.rec = rec
	if rec.Made > 0 {
		if err := r.settleMarks(ctx, sb); err != nil { // none of it keeps a machine from going on
			r.log.Warn("marks of a sandbox of an earlier process", "sandbox", id, "err", err)
		}
	}
	switch {
	case rec.Stopped:
		sb.Phase = tier.Stopped
		return errors.Join(r.killNamed(ctx, sb.machine()), r.removeGroup(ctx, sb))
	case rec.Made < rec.Starts && rec.Starts == 1:
		r.log.Info("undo a half-made sandbox", "sandbox", id)
		return r.remove(ctx, sb)
	case rec.Made < rec.Starts:
		r.log.Info("undo a half-made start", "sandbox", id)
		sb.Phase = tier.Stopped
		return errors.Join(r.killNamed(ctx, sb.machine()), r.removeGroup(ctx, sb), r.change(sb, func(rec *record) { rec.Stopped = true }))
	case rec.Exit != nil:
		sb.Phase = tier.Ended
		r.ends.Report(*rec.Exit)
		return r.killNamed(ctx, sb.machine())
	}
	return r.adoptRunning(ctx, sb)
}

func (r *Runtime) adoptRunning(ctx context.Context, sb *sandbox) error {
	sb.Phase = tier.Running
	if g, err := r.cfg.Groups.Group(string(sb.ID)); err == nil {
		sb.group = g
	}
	if err := r.useLayers(ctx, sb, sb.rec); err != nil {
		// The machine has its disk image open; only a revert needs ours.
		r.log.Warn("layer of a running sandbox", "sandbox", sb.ID, "err", err)
	}
	vm, err := r.cfg.Machines.Adopt(ctx, sb.machine())
	switch dsec.ClassOf(err) {
	case "":
	case dsec.SandboxGone:
		if sb.rec.Begun.Before(r.cfg.Since) {
			r.end(sb, lostWithHold(err.Error()))
		} else {
			r.end(sb, r.verdict(sb, err))
		}
		return nil
	case dsec.NotFound:
		r.end(sb, runtime.Exit{Cause: dsec.CauseInfraNodeLost, By: dsec.InducedByPlatform, Evidence: []string{"there is no machine of it any more"}})
		return nil
	default:
		return err
	}
	if err := r.attend(sb, vm); err != nil {
		return err
	}
	if sb.rec.Paused {
		return vm.Pause(ctx)
	}
	// Whoever was in the middle of a mark left it standing still.
	return vm.Resume(ctx)
}

// removeStrays removes what carries the name of a sandbox that has no state.
func (r *Runtime) removeStrays(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 6*lifecycle.UndoLimit)
	defer cancel()
	machines, err := r.cfg.Machines.Names(ctx)
	if err != nil {
		return err
	}
	groups, gerr := r.cfg.Groups.List()
	disks, derr := r.cfg.Disks.List(ctx)
	if err := errors.Join(gerr, derr); err != nil {
		return err
	}
	known := func(id string) bool {
		_, ok := r.boxes.Get(dsec.SandboxID(id))
		return ok
	}
	var errs []error
	for _, name := range machines {
		if strings.HasPrefix(name, machinePrefix) && !known(idOf(name)) {
			errs = append(errs, r.killNamed(ctx, name))
		}
	}
	for _, name := range groups {
		if !known(name) {
			errs = append(errs, r.cfg.Groups.Remove(ctx, name))
		}
	}
	for _, name := range disks {
		if !known(name) {
			errs = append(errs, r.cfg.Disks.Remove(ctx, name))
		}
	}
	return errors.Join(errs...)
}

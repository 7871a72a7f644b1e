package microvm

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/guest"
	"github.com/opendsec/dsec/internal/cgroup"
	"github.com/opendsec/dsec/internal/lifecycle"
	"github.com/opendsec/dsec/runtime"
	"github.com/opendsec/dsec/runtime/microvm/vmm"
	"github.com/opendsec/dsec/runtime/tier"
)

// adoptTime is how long the taking over of one machine may take.
const adoptTime = 40 * time.Second

// Place says which control groups the monitor of a machine is in.
func Place(groups *cgroup.Root) func(machine string) (group string, tasks []string) {
	return func(machine string) (string, []string) {
		g, err := groups.Group(Prefix + machine)
		if err != nil {
			return "", nil // the one of the hold
		}
		p := g.Paths()
		return p.Unified, p.Tasks
	}
}

// adopt takes over what an earlier process left: sandboxes with a state file go on, what has no
// state file is removed.
func (r *Runtime) adopt(ctx context.Context) error {
	entries, err := os.ReadDir(r.cfg.Dir)
	if err != nil {
		return dsec.E(dsec.Internal, "read state of sandboxes", r.cfg.Dir, err)
	}
	var ids []dsec.SandboxID
	for _, e := range entries {
		if id, _, err := dsec.ParseSandboxID(e.Name()); err == nil { // else it is not ours
			ids = append(ids, id)
		}
	}
	var keeper vmm.Adopter
	machines := map[string]bool{}
	var unreached error
	if len(ids) > 0 {
		m, err := r.bring(ctx)
		if err != nil {
			unreached = err
			r.log.Error("virtual machines of an earlier process cannot be reached", "err", err)
		} else {
			keeper, _ = m.VMM.(vmm.Adopter)
		}
	}
	if keeper != nil {
		names, err := keeper.Names(ctx)
		if err != nil {
			return err
		}
		for _, n := range names {
			machines[n] = true
		}
	}
	for _, id := range ids {
		err := r.adoptOne(ctx, keeper, id, machines)
		if errors.Is(err, errLost) && unreached != nil {
			err = unreached
		}
		switch {
		case err == nil:
		case errors.Is(err, tier.ErrVersion):
			return err
		default:
			endStray(ctx, keeper, string(id))
			r.lose(id, err)
		}
		delete(machines, string(id))
	}
	for name := range machines {
		endStray(ctx, keeper, name)
	}
	return r.removeStrays(ctx)
}

// errLost: its machine, or the hold that kept it, is gone.
var errLost = errors.New("its virtual machine is gone, and what kept it")

// endStray ends a machine that no sandbox has: one that served files, or was being made.
func endStray(ctx context.Context, keeper vmm.Adopter, name string) {
	if keeper == nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, adoptTime)
	defer cancel()
	if m, err := keeper.Adopt(ctx, name); err == nil { // else it is gone already
		m.Kill()
	}
}

// lose gives up a sandbox that cannot be taken over: one is not worth the node.
func (r *Runtime) lose(id dsec.SandboxID, err error) {
	r.log.Error("sandbox of an earlier process cannot be taken over", "sandbox", id, "err", err)
	sb := r.boxes.Reserve(id)
	sb.SetPhase(tier.Running)
	r.end(sb, runtime.Exit{Cause: dsec.CauseInfraNodeLost, By: dsec.InducedByPlatform,
		Evidence: []string{"the node agent restarted and could not take the sandbox over: " + err.Error()}})
}

func (r *Runtime) adoptOne(ctx context.Context, keeper vmm.Adopter, id dsec.SandboxID, machines map[string]bool) error {
	rec, err := readRecord(r.dir(id), id)
	sb := r.boxes.Reserve(id)
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, dsec.Corrupt.Err()) {
		// Killed in its first step, or the machine lost power, and then its disk is garbage too.
		r.log.Error("remove a sandbox whose state is broken", "sandbox", id, "err", err)
		return r.drop(ctx, keeper, sb)
	}
	if err != nil {
		return err
	}
	sb.rec = rec
	r.sweepMemory(rec)
	ready := rec.Ready == rec.Starts
	if x := readExit(r.dir(id), id); x != nil && ready && !rec.Stopped {
		if machines[string(id)] {
			endStray(ctx, keeper, string(id))
		}
		sb.Phase, sb.exit = tier.Ended, x
		r.report(sb, *x)
		return nil
	}
	switch {
	case rec.Suspended && !rec.Stopped:
		if machines[string(id)] { // which is on disk as a whole
			endStray(ctx, keeper, string(id))
		}
		sb.Phase, sb.Paused, sb.suspended = tier.Running, true, make(chan struct{})
		r.putAway(ctx, sb)
		return nil
	case rec.Stopped:
		if machines[string(id)] {
			endStray(ctx, keeper, string(id))
		}
		sb.Phase = tier.Stopped
		return errors.Join(r.groups.Remove(ctx, shared(id)), r.hold.Drop(ctx, netName(id)))
	case ready && machines[string(id)]:
		return r.adoptRunning(ctx, keeper, sb)
	case ready:
		return errLost
	case rec.Starts > 1:
		return r.undoStart(ctx, keeper, sb)
	}
	r.log.Info("undo a half-made sandbox", "sandbox", id)
	return r.drop(ctx, keeper, sb)
}

// sweepMemory removes what a suspension that was broken off has left.
func (r *Runtime) sweepMemory(rec *record) {
	left, _ := filepath.Glob(filepath.Join(r.dir(rec.Request.ID), ".tmp-*")) // the pattern is good
	if !rec.Suspended {
		left = append(left, r.memory(rec.Request.ID))
	}
	for _, path := range left {
		if err := os.RemoveAll(path); err != nil {
			r.log.Warn("remove what a suspension left", "sandbox", rec.Request.ID, "err", err)
		}
	}
}

// drop removes a sandbox of which there may be a machine that nobody owns.
func (r *Runtime) drop(ctx context.Context, keeper vmm.Adopter, sb *sandbox) error {
	if keeper != nil {
		endStray(ctx, keeper, string(sb.ID))
	}
	return r.remove(ctx, sb)
}

// undoStart brings a sandbox whose start was killed half-way back to stopped.
func (r *Runtime) undoStart(ctx context.Context, keeper vmm.Adopter, sb *sandbox) error {
	r.log.Info("undo a half-made start", "sandbox", sb.ID)
	endStray(ctx, keeper, string(sb.ID))
	if err := errors.Join(r.groups.Remove(ctx, shared(sb.ID)), r.hold.Drop(ctx, netName(sb.ID))); err != nil {
		return err
	}
	sb.Phase = tier.Stopped
	return r.rewrite(sb, func(rec *record) { rec.Stopped, rec.Lease = true, nil })
}

// adoptRunning takes over a machine and what runs in it.
func (r *Runtime) adoptRunning(ctx context.Context, keeper vmm.Adopter, sb *sandbox) (err error) {
	ctx, cancel := context.WithTimeout(ctx, adoptTime)
	defer cancel()
	if sb.group, err = r.groups.Group(shared(sb.ID)); err != nil {
		return err
	}
	m, err := keeper.Adopt(ctx, string(sb.ID))
	if err == nil {
		err = m.Resume(ctx)
	}
	if err != nil {
		sb.Phase = tier.Running
		x := runtime.Exit{Cause: dsec.CauseUnknown, By: dsec.InducedByUnknown, Evidence: []string{"its machine ended while the node agent did not run: " + err.Error()}}
		switch {
		case sb.rec.Begun.Before(r.hold.Info().Started):
			x.Cause, x.By = dsec.CauseInfraNodeLost, dsec.InducedByPlatform
			x.Evidence = append(x.Evidence, "the process that held the machine (dsec-hold) ended")
		case errors.Is(err, dsec.SandboxGone.Err()) && strings.Contains(err.Error(), "ended itself"):
			x.Cause, x.By = dsec.CauseAgentDamage, dsec.InducedBySelf
		}
		r.end(sb, x)
		return nil
	}
	sb.machine, sb.Phase = m, tier.Running
	c, err := r.session(ctx, sb)
	if err != nil { // whatever class the guest has given it
		err = dsec.E(dsec.Unavailable, "take over", string(sb.ID), err)
	}
	if err == nil && c.Hello().State == guest.Fresh { // it began anew, which is none of the sandbox that was
		err = dsec.Errorf(dsec.Unavailable, "take over", string(sb.ID), "its guest has started again")
	}
	if err != nil {
		return errors.Join(err, sb.endMachine(context.WithoutCancel(ctx)))
	}
	sb.Paused = c.Hello().State == guest.Frozen
	if r.cfg.Network != nil && sb.rec.Request.Spec.HasLink() {
		if err := r.cfg.Network.Restore(ctx, sb.ID, sb.rec.policy()); err != nil { // what is in force stays so
			r.log.Warn("names of a running sandbox cannot be asked for", "sandbox", sb.ID, "err", err)
		}
	}
	r.watch(sb, m)
	return nil
}

// removeStrays removes what carries the name of a sandbox that has no state.
func (r *Runtime) removeStrays(ctx context.Context) error {
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
	nets, err := r.hold.Names(ctx, netName(""))
	if err != nil {
		return err
	}
	var errs []error
	for _, name := range groups {
		if id, ok := strings.CutPrefix(name, Prefix); ok && !r.isOurs(id) {
			errs = append(errs, r.groups.Remove(ctx, name))
		}
	}
	for _, name := range disks {
		if id, ok := strings.CutPrefix(name, Prefix); ok && !r.isOurs(id) && !strings.HasPrefix(id, momentPrefix) {
			errs = append(errs, r.disks.Remove(ctx, name))
		}
	}
	errs = append(errs, r.dropMoments(ctx, disks))
	for _, name := range nets {
		if !r.isOurs(strings.TrimPrefix(name, netName(""))) {
			errs = append(errs, r.hold.Drop(ctx, name))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return dsec.E(dsec.Internal, "remove strays of sandboxes", r.cfg.Dir, err)
	}
	return nil
}

func (r *Runtime) isOurs(id string) bool {
	_, ok := r.boxes.Get(dsec.SandboxID(id))
	return ok
}

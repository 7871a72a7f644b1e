package container

import (
	"context"
	"errors"
	"strings"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/cgroup"
	"github.com/opendsec/dsec/internal/failpoint"
	"github.com/opendsec/dsec/process"
	"github.com/opendsec/dsec/runtime"
)

// manyStarts is more than commands are started at once in one sandbox.
const manyStarts = 1 << 20

var _ runtime.Phaser = (*Runtime)(nil)

// phase is the number of the one in force, or -1.
func (r *record) phase() int { return r.Request.Spec.PhaseIndex(r.Phase) }

// limits are those in force.
func (r *record) limits() dsec.Limits { return r.Request.Spec.LimitsIn(max(0, r.phase())) }

// arrive ends a move: what the phase says is in force now.
func (r *record) arrive() {
	if r.Moving == "" {
		return
	}
	r.Phase, r.Moving = r.Moving, ""
	if i := r.phase(); i >= 0 && r.Request.Spec.Phases[i].EndServices {
		r.Services = nil
	}
	if s := &r.Request.Spec; s.PhasesNetwork() {
		p := s.PolicyIn(r.phase())
		r.Network = &p
	}
}

func (sb *sandbox) isMoving() bool {
	sb.Mu.Lock()
	defer sb.Mu.Unlock()
	return sb.moving
}

func (sb *sandbox) setMoving(on bool) {
	sb.Mu.Lock()
	defer sb.Mu.Unlock()
	sb.moving = on
}

func betweenPhases(op string, sb *sandbox) error {
	return dsec.Errorf(dsec.IllegalState, op, string(sb.ID), "it is on its way to another phase")
}

// beginStart lets a command be started, and a move wait for it until done.
func (sb *sandbox) beginStart(ctx context.Context, op string) (done func(), err error) {
	if sb.isMoving() { // before it would wait
		return nil, betweenPhases(op, sb)
	}
	if err := sb.starts.Acquire(ctx, 1); err != nil {
		return nil, dsec.E(dsec.ClassOf(err), op, string(sb.ID), err)
	}
	if sb.isMoving() {
		sb.starts.Release(1)
		return nil, betweenPhases(op, sb)
	}
	return func() { sb.starts.Release(1) }, nil
}

// SetPhase moves a running sandbox to another phase. Its record says where to before
// anything is done; from then until the end nothing that could run is thawed.
func (r *Runtime) SetPhase(ctx context.Context, id dsec.SandboxID, name string) (m runtime.Moved, err error) {
	const op = "set phase of sandbox"
	sb, err := r.boxes.Acquire(ctx, op, id)
	if err != nil {
		return m, err
	}
	defer sb.Leave()
	if _, err := r.boxes.Live(op, id); err != nil {
		return m, err
	}
	rec := sb.record()
	switch spec := &rec.Request.Spec; {
	case spec.PhaseIndex(name) < 0:
		return m, dsec.Errorf(dsec.Invalid, op, string(id), "it has no phase %s", dsec.Quote(name))
	case rec.Moving != "" && rec.Moving != name:
		return m, dsec.Errorf(dsec.IllegalState, op, string(id), "it is on its way to %s", dsec.Quote(rec.Moving))
	case rec.Moving == "" && rec.Phase == name: // done, and not told
		if spec.PhasesNetwork() && spec.HasLink() {
			if m.Network, err = r.setNetwork(ctx, op, sb, rec.policy()); err != nil {
				return m, err
			}
		}
		return m, r.wrap(op, id, r.leaveMove(ctx, sb))
	}
	if err := sb.stopStarts(ctx, op); err != nil {
		return m, err
	}
	if err := r.rerecord(sb, func(rec *record) { rec.Moving = name }); err != nil {
		sb.setMoving(false)
		return m, err
	}
	m, err = r.move(ctx, sb)
	return m, r.wrap(op, id, err)
}

// stopStarts refuses commands from now on, and waits for those that are just being
// started.
func (sb *sandbox) stopStarts(ctx context.Context, op string) error {
	sb.setMoving(true)
	if err := sb.starts.Acquire(ctx, manyStarts); err != nil {
		sb.setMoving(false)
		return dsec.E(dsec.ClassOf(err), op, string(sb.ID), err)
	}
	sb.starts.Release(manyStarts)
	return nil
}

// move does all that the record says was begun. It may be done again from any point.
func (r *Runtime) move(ctx context.Context, sb *sandbox) (m runtime.Moved, err error) {
	sb.Mu.Lock()
	g, to := sb.group, *sb.rec
	sb.Mu.Unlock()
	to.arrive()
	if m.Killed, err = r.killAll(ctx, sb, g, to.isService); err != nil {
		return m, err
	}
	if err := failpoint.Hit(ctx, "container.phase.killed"); err != nil {
		return m, err
	}
	if s := &to.Request.Spec; s.PhasesNetwork() && s.HasLink() {
		if m.Network, err = r.setNetwork(ctx, "set phase of sandbox", sb, *to.Network); err != nil {
			return m, err
		}
	}
	if err := g.Update(ctx, groupLimits(to.limits())); err != nil {
		return m, err
	}
	if err := r.moveFiles(ctx, sb, to.phase()); err != nil {
		return m, err
	}
	if err := r.rerecord(sb, func(rec *record) { rec.arrive() }); err != nil {
		return m, err
	}
	if err := failpoint.Hit(ctx, "container.phase.recorded"); err != nil {
		return m, err
	}
	return m, r.leaveMove(ctx, sb)
}

// leaveMove lets the sandbox go on in the phase that is recorded.
func (r *Runtime) leaveMove(ctx context.Context, sb *sandbox) error {
	sb.Mu.Lock()
	sb.Paused = true // it is frozen
	sb.Mu.Unlock()
	if err := r.thaw(ctx, sb); err != nil {
		return err
	}
	sb.setMoving(false)
	return nil
}

// killAll freezes the sandbox and ends everything in it but services, and its PID 1,
// which runs no program of anybody's. A frozen process dies without running again.
func (r *Runtime) killAll(ctx context.Context, sb *sandbox, g *cgroup.Group, keep func(exec string) bool) (int, error) {
	sb.services.Close()
	if err := r.hold.HoldClock(ctx, string(sb.ID), true); err != nil { // of services
		return 0, err
	}
	kept := func(group string) bool { return keep(strings.TrimPrefix(group, "exec-")) }
	fctx, cancel := context.WithTimeout(ctx, freezeWithin)
	defer cancel()
	// One that does not stand still in time is killed as it is: it is in the kernel,
	// and dies before it runs again.
	froze := g.Freeze(fctx)
	sb.Mu.Lock()
	sb.Paused = true
	sb.Mu.Unlock()
	n, err := g.InChildren(kept)
	if err != nil {
		return n, err
	}
	known, err := r.hold.List(ctx)
	if err != nil {
		return n, err
	}
	for _, s := range known {
		if s.ID != string(sb.ID) {
			continue
		}
		for _, e := range s.Execs {
			if e.Ended || keep(e.Spec.ID) {
				continue
			}
			if err := r.killOne(ctx, sb, e.Spec.ID); err != nil {
				return n, err
			}
		}
	}
	if err := g.KillChildren(ctx, kept); err != nil {
		return n, errors.Join(err, froze)
	}
	if froze != nil { // what kept it from standing still is gone
		return n, g.Freeze(ctx)
	}
	return n, nil
}

// killOne is told to the hold, so that the command's end says that it was killed.
func (r *Runtime) killOne(ctx context.Context, sb *sandbox, exec string) error {
	var p process.Process
	p, err := r.hold.Process(ctx, string(sb.ID), exec)
	if err == nil {
		err = p.Kill(ctx)
	}
	if c := dsec.ClassOf(err); c == dsec.NotFound || c == dsec.IllegalState { // it has ended
		return nil
	}
	return err
}

// killMoving ends what a move that broke off has left, before it is thawed to be
// stopped.
func (r *Runtime) killMoving(sb *sandbox) error {
	sb.Mu.Lock()
	g, moving := sb.group, sb.moving
	sb.Mu.Unlock()
	if !moving || g == nil {
		return nil
	}
	return g.Kill()
}

// adoptPhase finds a move that an earlier process had begun: it stands still until
// the move is asked for again. One that had come to its end is let go on.
func (r *Runtime) adoptPhase(ctx context.Context, sb *sandbox, g *cgroup.Group) error {
	if len(sb.rec.Request.Spec.Phases) == 0 {
		return nil
	}
	if err := r.keepRoot(ctx, sb); err != nil {
		return err
	}
	if sb.rec.Moving == "" {
		return nil
	}
	sb.setMoving(true)
	frozen, err := g.Frozen()
	if err != nil || frozen {
		return err
	}
	fctx, cancel := context.WithTimeout(ctx, freezeWithin)
	defer cancel()
	return g.Freeze(fctx)
}

package microvm

import (
	"context"
	"errors"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/files"
	"github.com/opendsec/dsec/guest"
	"github.com/opendsec/dsec/internal/lifecycle"
	"github.com/opendsec/dsec/runtime/microvm/vmm"
	"github.com/opendsec/dsec/runtime/tier"
)

// diskIdle is how long the machine stays that serves the files of a sandbox which does not
// run, when nobody uses them.
const diskIdle = 15 * time.Second

// Files opens the file service as a user. That of a sandbox which does not run is served by a
// machine without a network that lives as long as somebody uses it.
func (r *Runtime) Files(ctx context.Context, id dsec.SandboxID, user string) (files.FS, error) {
	const op = "open files of sandbox"
	sb, err := r.boxes.FindInside(op, id)
	if err != nil {
		return nil, err
	}
	s := &tier.FileService{Explain: func(err error) error { return r.explain("reach files of sandbox", sb, err) }, Open: func(ctx context.Context) (*files.Redialing, error) {
		c, err := r.reach(ctx, op, sb)
		if err != nil {
			return nil, err
		}
		fs, err := sb.services.Get(ctx, user, c, func(ctx context.Context) (*files.Redialing, error) { return c.Files(ctx, user) })
		return fs, r.explain(op, sb, err)
	}}
	_, err = s.Open(ctx)
	return s, err
}

// reach returns the session by which a sandbox's files are reached.
func (r *Runtime) reach(ctx context.Context, op string, sb *sandbox) (*guest.Client, error) {
	switch sb.GetPhase() {
	case tier.Running:
		if err := r.bringBack(ctx, sb); err != nil {
			return nil, err
		}
		return r.session(ctx, sb)
	case tier.Stopped, tier.Ended:
		return r.diskSession(ctx, op, sb)
	case tier.Making:
		return nil, dsec.Errorf(dsec.IllegalState, op, string(sb.ID), "the sandbox is being made")
	}
	return nil, dsec.Errorf(dsec.SandboxGone, op, string(sb.ID), "the sandbox has ended")
}

// diskMachine serves the files of a sandbox that does not run.
type diskMachine struct {
	m    vmm.VM
	c    *guest.Client
	used time.Time // guarded by the sandbox's mu
}

func diskName(id dsec.SandboxID) string { return string(id) + ".disk" }

func (r *Runtime) diskSession(ctx context.Context, op string, sb *sandbox) (*guest.Client, error) {
	if err := sb.Enter(ctx, op); err != nil {
		return nil, err
	}
	defer sb.Leave()
	if p := sb.GetPhase(); p != tier.Stopped && p != tier.Ended {
		return nil, dsec.Errorf(dsec.Unavailable, op, string(sb.ID), "the sandbox changed its state during the call")
	}
	sb.Mu.Lock()
	d := sb.disk
	if d != nil {
		d.used = time.Now()
	}
	sb.Mu.Unlock()
	if d != nil && !over(d.c) {
		return d.c, nil
	}
	// Two machines with one disk would spoil it.
	if err := errors.Join(r.powerOff(ctx, sb, 0), r.endDisk(ctx, sb)); err != nil {
		return nil, tier.Wrap(op, sb.ID, err)
	}
	d, err := r.startDisk(ctx, sb)
	if err != nil {
		return nil, tier.Wrap(op, sb.ID, err)
	}
	sb.Mu.Lock()
	sb.disk = d
	sb.Mu.Unlock()
	r.tasks.Go(func() { r.endIdle(sb, d) })
	return d.c, nil
}

func (r *Runtime) startDisk(ctx context.Context, sb *sandbox) (*diskMachine, error) {
	rec := *sb.record()
	rec.Lease = nil
	name := diskName(sb.ID)
	d := &diskMachine{used: time.Now()}
	var m Machinery
	var l *backing
	defer func() {
		if l != nil {
			l.letGo()
		}
	}()
	_, err := lifecycle.Run(ctx, "microvm.disk", []lifecycle.Step{
		{Name: "kernel", Do: func(ctx context.Context) (err error) {
			m, err = r.open(ctx)
			return err
		}},
		{Name: "layers", Do: func(ctx context.Context) (err error) {
			if l, err = r.back(ctx, m, rec.Request, nil); err == nil {
				rec.Read, l.shape.Balloon = l.read, false // it is not here for long
			}
			return err
		}},
		{Name: "cgroup", Do: func(context.Context) error {
			_, err := r.groups.Create(Prefix+name, groupLimits(rec.Request.Spec.Limits, l.shape.Memory))
			return err
		}, Undo: func(ctx context.Context) error { return r.groups.Remove(ctx, Prefix+name) }},
		{Name: "machine", Do: func(ctx context.Context) (err error) {
			d.m, err = r.clone(ctx, m, l, cloneOf{name: name, disk: shared(sb.ID)})
			return err
		}, Undo: func(ctx context.Context) error { return endMachine(ctx, d.m, d.c) }},
		{Name: "root", Do: func(ctx context.Context) (err error) {
			if d.c, err = connect(ctx, d.m.Channel()); err != nil {
				return err
			}
			ctx, cancel := context.WithTimeout(ctx, resumeTime+mountTime)
			defer cancel()
			if err = d.c.Resume(ctx, r.identity(sb, &rec)); err == nil {
				err = d.c.Mount(ctx, mountOf(&rec))
			}
			if err != nil {
				_ = d.c.Close()
			}
			return err
		}},
	}...)
	if err != nil {
		return nil, err
	}
	return d, nil
}

// endIdle ends a machine that nobody uses any more.
func (r *Runtime) endIdle(sb *sandbox, d *diskMachine) {
	tick := time.NewTicker(diskIdle / 3)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-d.c.Done():
			return
		case <-r.life.Done():
			return
		}
		sb.Mu.Lock()
		late := time.Since(d.used) > diskIdle
		sb.Mu.Unlock()
		if !late || !sb.services.Idle() || sb.Enter(r.life, "end idle machine") != nil {
			continue
		}
		sb.Mu.Lock()
		mine := sb.disk == d && time.Since(d.used) > diskIdle
		sb.Mu.Unlock()
		if mine {
			ctx, cancel := context.WithTimeout(r.life, 2*lifecycle.UndoLimit)
			if err := r.endDisk(ctx, sb); err != nil && r.life.Err() == nil {
				r.log.Warn("end the machine that served files", "sandbox", sb.ID, "err", err)
			}
			cancel()
		}
		sb.Leave()
	}
}

// endDisk ends the machine that serves files, if there is one; the caller has the turn.
func (r *Runtime) endDisk(ctx context.Context, sb *sandbox) error {
	sb.Mu.Lock()
	d := sb.disk
	sb.disk = nil
	sb.Mu.Unlock()
	if d == nil {
		return r.groups.Remove(ctx, Prefix+diskName(sb.ID)) // if one before could not
	}
	sb.services.Close()
	if p := sb.GetPhase(); p != tier.Removing && !over(d.c) && !tier.IsDone(d.m.Done()) {
		limited, cancel := context.WithTimeout(ctx, lifecycle.UndoLimit)
		if err := d.c.Shutdown(limited, 0); err != nil {
			r.log.Warn("a guest did not end in order", "sandbox", sb.ID, "err", err)
		}
		cancel()
	}
	if err := endMachine(ctx, d.m, d.c); err != nil {
		return err
	}
	return r.groups.Remove(ctx, Prefix+diskName(sb.ID))
}

package microvm

import (
	"context"
	"errors"
	"io"
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

// service is the file service of one user. It says when its sandbox is gone.
type service struct {
	*files.Redialing
	r  *Runtime
	sb *sandbox
	c  *guest.Client // whose it is
}

// Files opens the file service as a user. That of a sandbox which does not run is served by a
// machine without a network that lives as long as somebody uses it.
func (r *Runtime) Files(ctx context.Context, id dsec.SandboxID, user string) (files.FS, error) {
	const op = "open files of sandbox"
	sb, err := r.boxes.FindInside(op, id)
	if err != nil {
		return nil, err
	}
	c, err := r.reach(ctx, op, sb)
	if err != nil {
		return nil, err
	}
	sb.Mu.Lock()
	s := sb.services[user]
	sb.Mu.Unlock()
	if s != nil && s.c == c {
		return s, nil
	}
	fs, err := c.Files(ctx, user)
	if err != nil {
		return nil, r.explain(op, sb, err)
	}
	s = &service{fs, r, sb, c}
	sb.Mu.Lock()
	if sb.services == nil {
		sb.services = map[string]*service{}
	}
	was := sb.services[user]
	sb.services[user] = s
	sb.Mu.Unlock()
	if was != nil && was.c != c {
		_ = was.Close()
	}
	return s, nil
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

// closeServices ends the file services of a sandbox, calls in flight included.
func (sb *sandbox) closeServices() {
	sb.Mu.Lock()
	all := sb.services
	sb.services = nil
	sb.Mu.Unlock()
	for _, s := range all {
		_ = s.Redialing.Close() // it only ever reports what is wanted here
	}
}

// idle reports whether nobody uses a file service.
func (sb *sandbox) idle() bool {
	sb.Mu.Lock()
	defer sb.Mu.Unlock()
	for _, s := range sb.services {
		if !s.Idle() {
			return false
		}
	}
	return true
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
		if !late || !sb.idle() || sb.Enter(r.life, "end idle machine") != nil {
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
	sb.closeServices()
	if p := sb.GetPhase(); p != tier.Removing && !over(d.c) && !isDone(d.m.Done()) {
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

func (s *service) say(err error) error { return s.r.explain("reach files of sandbox", s.sb, err) }

func (s *service) Stat(ctx context.Context, path string, follow bool) (files.Info, error) {
	i, err := s.Redialing.Stat(ctx, path, follow)
	return i, s.say(err)
}

func (s *service) List(ctx context.Context, path string, depth int) ([]files.Info, error) {
	all, err := s.Redialing.List(ctx, path, depth)
	return all, s.say(err)
}

func (s *service) Read(ctx context.Context, path string, offset, length int64, w io.Writer) (int64, error) {
	n, err := s.Redialing.Read(ctx, path, offset, length, w)
	return n, s.say(err)
}

func (s *service) Write(ctx context.Context, path string, body io.Reader, o files.WriteOptions) (files.Info, error) {
	i, err := s.Redialing.Write(ctx, path, body, o)
	return i, s.say(err)
}

func (s *service) Mkdir(ctx context.Context, path string, mode uint32, parents bool) error {
	return s.say(s.Redialing.Mkdir(ctx, path, mode, parents))
}

func (s *service) Move(ctx context.Context, from, to string) error {
	return s.say(s.Redialing.Move(ctx, from, to))
}

func (s *service) Remove(ctx context.Context, path string, recursive bool) error {
	return s.say(s.Redialing.Remove(ctx, path, recursive))
}

func (s *service) SetAttr(ctx context.Context, path string, a files.Attr) error {
	return s.say(s.Redialing.SetAttr(ctx, path, a))
}

func (s *service) Upload(ctx context.Context, dir string, body io.Reader, o files.TreeOptions) error {
	return s.say(s.Redialing.Upload(ctx, dir, body, o))
}

func (s *service) Download(ctx context.Context, dir string, w io.Writer, o files.TreeOptions) error {
	return s.say(s.Redialing.Download(ctx, dir, w, o))
}

func (s *service) Watch(ctx context.Context, dir string, recursive bool, fn func(files.Change) error) error {
	return s.say(s.Redialing.Watch(ctx, dir, recursive, fn))
}

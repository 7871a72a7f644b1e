package container

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/cgroup"
	"github.com/opendsec/dsec/internal/diskpool"
	"github.com/opendsec/dsec/internal/hold"
	"github.com/opendsec/dsec/internal/lifecycle"
	"github.com/opendsec/dsec/netpolicy"
	"github.com/opendsec/dsec/rootfs"
	"github.com/opendsec/dsec/runtime"
	"github.com/opendsec/dsec/runtime/tier"
)

// build is a sandbox on its way to running. The files are closed when the way
// ends, however it ends.
type build struct {
	r     *Runtime
	sb    *sandbox
	rec   *record
	dir   *os.File // on the disk pool
	root  *os.File
	ready *shell // made ahead; nil: shell is made on the way
	shell *hold.Shell
	lease netpolicy.Lease
	lives bool // the root is kept by the sandbox

	hasRoom bool // see makeRoom
}

func (b *build) close() {
	files := []*os.File{b.dir}
	if !b.lives {
		files = append(files, b.root)
	}
	if b.shell != nil {
		files = append(files, b.shell.UserNS, b.shell.NetNS)
	}
	for _, f := range files {
		if f != nil {
			f.Close()
		}
	}
}

// Create builds a sandbox and has it running.
func (r *Runtime) Create(ctx context.Context, req runtime.Request) ([]dsec.Step, error) {
	const op = "create sandbox"
	if err := r.check(op, &req); err != nil {
		return nil, err
	}
	sb := r.boxes.Reserve(req.ID)
	if err := sb.Enter(ctx, op); err != nil {
		return nil, err
	}
	defer sb.Leave()
	if !r.boxes.Current(sb) { // destroyed while we waited
		return nil, dsec.Errorf(dsec.Conflict, op, string(req.ID), "destroyed by another call")
	}
	if rec := sb.record(); rec != nil {
		return nil, tier.SameRequest(op, rec.Request, req)
	}
	select {
	case r.slots <- struct{}{}:
		defer func() { <-r.slots }()
	case <-ctx.Done():
		r.forget(sb)
		return nil, dsec.E(dsec.ClassOf(ctx.Err()), op, string(req.ID), context.Cause(ctx))
	}
	b := &build{r: r, sb: sb, rec: &record{Request: req, Begun: time.Now().UTC(), Starts: 1}, ready: r.shells.take(r.shapeOf(req.Spec))}
	if p := req.Spec.Phases; len(p) > 0 {
		b.rec.Phase = p[0].Name
	}
	defer b.close()
	sb.beginMaking()
	steps := append([]lifecycle.Step{b.state(), b.disk()}, b.begin()...)
	took, err := lifecycle.Run(ctx, "container.create", steps...)
	if err != nil {
		if b.ready != nil {
			r.discard(ctx, b.ready)
		}
		r.forget(sb)
		return took, r.wrap(op, req.ID, err)
	}
	return took, nil
}

// check refuses what can never work here.
func (r *Runtime) check(op string, req *runtime.Request) error {
	if _, _, err := dsec.ParseSandboxID(string(req.ID)); err != nil {
		return err
	}
	if len(req.Layers.Layers) == 0 {
		return dsec.Errorf(dsec.Invalid, op, string(req.ID), "no layers")
	}
	if _, err := r.profile(req.Spec.Profile); err != nil {
		return err
	}
	if err := r.CanPhase(req.Spec); err != nil {
		return err
	}
	if req.Spec.HasLink() && r.cfg.Network == nil {
		return dsec.Errorf(dsec.Unsupported, op, string(req.ID), "this node has no network for sandboxes")
	}
	return nil
}

// forget takes a sandbox of which nothing is left out of the map.
func (r *Runtime) forget(sb *sandbox) {
	r.ends.Acknowledge(sb.ID)
	sb.services.Close()
	sb.closeRoot()
	sb.Mu.Lock()
	sb.Phase, sb.rec, sb.group = tier.Absent, nil, nil
	sb.Mu.Unlock()
	r.boxes.Forget(sb)
}

// wrap names the call and the sandbox in the error of a step; nil stays nil.
func (r *Runtime) wrap(op string, id dsec.SandboxID, err error) error {
	if err == nil {
		return nil
	}
	return dsec.E(dsec.ClassOf(err), op, string(id), err)
}

// state takes a uid range and writes down what was asked for, before anything
// else exists but a shell that nobody needs to remember.
func (b *build) state() lifecycle.Step {
	return lifecycle.Step{Name: "state", Do: func(context.Context) (err error) {
		if b.rec.UID, err = b.takeUIDs(); err != nil {
			return err
		}
		if err = b.setProfile(); err != nil {
			b.giveUIDs()
			return err
		}
		dir := b.r.dir(b.sb.ID)
		if err = os.Mkdir(dir, 0o700); err == nil {
			err = writeNewRecord(dir, b.rec)
		}
		if err != nil {
			err = errors.Join(err, os.RemoveAll(dir))
			b.giveUIDs()
			return dsec.E(dsec.Internal, "write state of sandbox", string(b.sb.ID), err)
		}
		b.sb.Mu.Lock()
		b.sb.rec = b.rec
		b.sb.Mu.Unlock()
		return nil
	}, Undo: func(context.Context) error {
		if err := b.r.removeState(b.sb.ID); err != nil {
			return err
		}
		b.giveUIDs()
		return nil
	}}
}

func (b *build) takeUIDs() (uint32, error) {
	if b.ready == nil {
		return b.r.uids.Take(b.sb.ID)
	}
	b.rec.Shell = b.ready.name
	b.r.uids.Pass(b.ready.uid, dsec.SandboxID(b.ready.name), b.sb.ID)
	return b.ready.uid, nil
}

// giveUIDs undoes takeUIDs. The uids of a shell are its own as long as it lives.
func (b *build) giveUIDs() {
	if b.ready == nil {
		b.r.uids.Give(b.rec.UID, b.sb.ID)
		return
	}
	b.r.uids.Pass(b.ready.uid, b.sb.ID, dsec.SandboxID(b.ready.name))
}

func (r *Runtime) removeState(id dsec.SandboxID) error {
	dir := r.dir(id)
	// Two calls instead of a walk, where nothing else is in it.
	if err := errors.Join(os.Remove(filepath.Join(dir, stateFile)), os.Remove(dir)); err != nil {
		if err := os.RemoveAll(dir); err != nil {
			return dsec.E(dsec.Internal, "remove state of sandbox", string(id), err)
		}
	}
	return nil
}

func (b *build) disk() lifecycle.Step {
	id := string(b.sb.ID)
	return lifecycle.Step{Name: "disk", Do: func(ctx context.Context) (err error) {
		b.dir, err = b.r.disks.Create(ctx, id, b.rec.Request.Spec.Limits.Disk, diskpool.Owner{})
		if err != nil {
			return err
		}
		err = b.prepareDir()
		if err == nil {
			err = b.likePacked()
		}
		if err != nil {
			return errors.Join(err, b.r.disks.Remove(context.WithoutCancel(ctx), id))
		}
		return nil
	}, Undo: func(ctx context.Context) error { return b.r.disks.Remove(ctx, id) }}
}

func (b *build) prepareDir() error {
	return rootfs.PrepareDir(b.dir, int(b.rec.UID), int(b.rec.UID))
}

// begin are the steps that creation and start have in common: from a disk to a
// running sandbox.
func (b *build) begin() []lifecycle.Step {
	id := string(b.sb.ID)
	last := []lifecycle.Step{{Name: "main", Do: b.main}}
	if b.rec.phase() >= 0 {
		last = append([]lifecycle.Step{{Name: "phase", Do: b.bind}}, last...)
	}
	steps := append(b.profileLoaded(), []lifecycle.Step{
		{Name: "cgroup", Do: b.cgroup, Undo: func(ctx context.Context) error {
			b.sb.Mu.Lock()
			b.sb.group = nil
			b.sb.Mu.Unlock()
			return b.r.groups.Remove(ctx, b.rec.group())
		}},
		{Name: "layers", Do: func(ctx context.Context) error {
			return b.r.mounts.Use(ctx, id, b.rec.Request.Layers.Layers)
		}, Undo: func(context.Context) error { b.r.mounts.Unuse(id); return nil }},
		{Name: "spawn", Do: b.spawn, Undo: func(ctx context.Context) error {
			return errors.Join(b.r.hold.RemoveSandbox(ctx, id), b.r.hold.RemoveSandbox(ctx, b.rec.group()))
		}},
		{Name: "network", Do: b.network}, // ends with the namespace
		{Name: "root", Do: b.stack},
		{Name: "setup", Do: func(ctx context.Context) error {
			if err := b.settle(ctx); err != nil {
				return err
			}
			if err := b.setup(ctx); err != nil {
				return err
			}
			return b.takeRoom(ctx)
		}},
		{Name: "enter", Do: b.enter, Undo: func(ctx context.Context) error {
			b.sb.closeRoot()
			b.r.unwitness(ctx, b.sb.ID)
			return nil
		}},
	}...)
	return append(steps, last...)
}

func (b *build) cgroup(context.Context) (err error) {
	var g *cgroup.Group
	if b.ready != nil {
		g = b.ready.group
	} else if g, err = b.r.groups.Create(b.rec.group(), groupLimits(b.rec.limits())); err != nil {
		return err
	}
	b.sb.Mu.Lock()
	b.sb.group = g
	b.sb.Mu.Unlock()
	return nil
}

func (b *build) spawn(ctx context.Context) (err error) {
	if b.ready != nil {
		b.shell = b.ready.ns
		return nil
	}
	b.sb.Mu.Lock()
	g := b.sb.group
	b.sb.Mu.Unlock()
	b.shell, err = b.r.spawn(ctx, b.rec.group(), g, b.rec.UID, b.rec.Request.Spec.Limits.Memory)
	return err
}

func (b *build) stack(ctx context.Context) (err error) {
	if err := b.withhold(ctx); err != nil {
		return err
	}
	b.root, err = b.r.mounts.Stack(rootfs.Root{User: string(b.sb.ID), Layers: digests(b.rec.Request.Layers), UserNS: b.shell.UserNS, Dir: b.dir})
	return err
}

func (b *build) main(ctx context.Context) error {
	spec := b.rec.Request.Spec
	if len(spec.Command) > 0 {
		if _, err := b.r.start(ctx, b.sb, mainProcess(b.rec.Request)); err != nil {
			return err
		}
	}
	b.sb.Mu.Lock()
	early := b.sb.early
	b.sb.Phase, b.sb.exit, b.sb.early, b.sb.Paused = tier.Running, nil, nil, false
	b.sb.Mu.Unlock()
	if early != nil {
		b.r.end(b.sb, *early)
	}
	return nil
}

package gvisor

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/confine"
	"github.com/opendsec/dsec/internal/accounts"
	"github.com/opendsec/dsec/internal/cgroup"
	"github.com/opendsec/dsec/internal/diskpool"
	"github.com/opendsec/dsec/internal/hold"
	"github.com/opendsec/dsec/internal/lifecycle"
	"github.com/opendsec/dsec/netpolicy"
	"github.com/opendsec/dsec/runtime"
	"github.com/opendsec/dsec/runtime/tier"
)

// build is a sandbox on its way to running: an instance of runsc over its disk.
type build struct {
	r     *Runtime
	sb    *sandbox
	rec   *record
	name  string // of group and shell
	group *cgroup.Group
	dir   *os.File // on the disk pool
	shell *hold.Shell
	lease netpolicy.Lease
	quiet bool // only for its files: no network, no main process
}

func (b *build) close() {
	if b.dir != nil {
		b.dir.Close()
	}
	if b.shell != nil {
		b.shell.Close()
	}
}

// Create builds a sandbox and has it running.
func (r *Runtime) Create(ctx context.Context, req runtime.Request) ([]dsec.Step, error) {
	const op = "create sandbox"
	if err := r.check(op, &req); err != nil {
		return nil, err
	}
	if err := r.usable(ctx); err != nil {
		return nil, tier.Wrap(op, req.ID, err)
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
	b := &build{r: r, sb: sb, name: name(req.ID), rec: &record{Request: req, Image: imageOf(req.Layers.Layers), Begun: time.Now().UTC(), Starts: 1}}
	defer b.close()
	sb.beginMaking()
	took, err := lifecycle.Run(ctx, "gvisor.create", append([]lifecycle.Step{b.state(), b.disk()}, b.begin()...)...)
	if err != nil {
		r.forget(sb)
		return took, tier.Wrap(op, req.ID, err)
	}
	return took, nil
}

// check refuses what can never work here.
func (r *Runtime) check(op string, req *runtime.Request) error {
	if _, _, err := dsec.ParseSandboxID(string(req.ID)); err != nil {
		return err
	}
	cannot := func(what string) error {
		return dsec.Errorf(dsec.Unsupported, op, string(req.ID), "isolation gvisor cannot give %s", what)
	}
	s := req.Spec
	switch {
	case len(req.Layers.Layers) == 0:
		return dsec.Errorf(dsec.Invalid, op, string(req.ID), "no layers")
	case len(s.Phases) > 0:
		return cannot("phases")
	case len(s.Mounts) > 0:
		return cannot("directories of the machine")
	case s.OOM == dsec.OOMExec:
		return cannot("oom=exec: the machine's memory limit knows the sentry only, so it ends the whole sandbox")
	case s.HasLink() && r.cfg.Network == nil:
		return dsec.Errorf(dsec.Unsupported, op, string(req.ID), "this node has no network for sandboxes")
	}
	_, err := profile(s.Profile)
	return err
}

// profile is the one of that name, if its abilities are had behind gVisor.
func profile(name string) (confine.Profile, error) {
	p, err := confine.ParseProfile(name)
	if err != nil {
		return p, err
	}
	if err := confine.Require(p, dsec.TierContainer); err != nil {
		return p, err
	}
	if p != confine.Build && p != confine.Debug {
		return p, dsec.Errorf(dsec.Unsupported, "choose profile", string(p), "isolation gvisor gives %s and %s", confine.Build, confine.Debug)
	}
	return p, nil
}

// state takes a uid range and writes down what was asked for, before anything else exists.
func (b *build) state() lifecycle.Step {
	return lifecycle.Step{Name: "state", Do: func(context.Context) (err error) {
		if b.rec.UID, err = b.r.uids.Take(b.sb.ID); err != nil {
			return err
		}
		dir := b.r.dir(b.sb.ID)
		// The bundle is the root of a mount, and another user reads there.
		if err = errors.Join(os.Mkdir(dir, 0o700), os.Mkdir(filepath.Join(dir, "b"), 0o755)); err == nil {
			err = writeRecord(dir, b.rec)
		}
		if err != nil {
			err = errors.Join(err, os.RemoveAll(dir))
			b.r.uids.Give(b.rec.UID, b.sb.ID)
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
		b.r.uids.Give(b.rec.UID, b.sb.ID)
		return nil
	}}
}

func (r *Runtime) removeState(id dsec.SandboxID) error {
	if err := os.RemoveAll(r.dir(id)); err != nil {
		return dsec.E(dsec.Internal, "remove state of sandbox", string(id), err)
	}
	return nil
}

// archives is how many times its limit a disk may take for a moment: while the upper
// layer is written down there are what it is read from, the last one and the new one.
const (
	archives  = 3
	diskSpare = 64 << 20
)

func (b *build) disk() lifecycle.Step {
	id := name(b.sb.ID)
	return lifecycle.Step{Name: "disk", Do: func(ctx context.Context) (err error) {
		limit := b.rec.Request.Spec.Limits.Disk
		if limit > 0 {
			limit = archives*limit + diskSpare
		}
		b.dir, err = b.r.disks.Create(ctx, id, limit, diskpool.Owner{UID: int(b.rec.UID), GID: int(b.rec.UID)})
		return err
	}, Undo: func(ctx context.Context) error { return b.r.disks.Remove(ctx, id) }}
}

// reopen opens the disk of a sandbox that was stopped.
func (b *build) reopen() lifecycle.Step {
	return lifecycle.Step{Name: "disk", Do: func(ctx context.Context) (err error) {
		b.dir, err = b.r.disks.Open(ctx, name(b.sb.ID))
		return err
	}}
}

// begin are the steps that creation and start have in common: from a disk to a running
// sandbox.
func (b *build) begin() []lifecycle.Step {
	return append(b.instance(), lifecycle.Step{Name: "main", Do: b.main})
}

// instance are the steps from a disk to a sentry that runs.
func (b *build) instance() []lifecycle.Step {
	return []lifecycle.Step{
		{Name: "layers", Do: func(ctx context.Context) error {
			if b.rec.Image == emptyImage {
				b.r.images.hold(b.name, emptyImage)
				return nil
			}
			_, err := b.r.images.Use(ctx, b.name, b.rec.Request.Layers.Layers)
			return err
		}, Undo: func(context.Context) error { b.r.images.Unuse(b.name); return nil }},
		{Name: "cgroup", Do: func(context.Context) (err error) {
			if b.group, err = b.r.groups.Create(b.name, groupLimits(b.rec.Request.Spec.LimitsIn(0))); err == nil && !b.quiet {
				b.sb.Mu.Lock()
				b.sb.group = b.group
				b.sb.Mu.Unlock()
			}
			return err
		}, Undo: func(ctx context.Context) error {
			if !b.quiet {
				b.sb.Mu.Lock()
				b.sb.group = nil
				b.sb.Mu.Unlock()
			}
			return b.r.groups.Remove(ctx, b.name)
		}},
		{Name: "spawn", Do: b.spawn, Undo: func(ctx context.Context) error { return b.r.hold.RemoveSandbox(ctx, b.name) }},
		{Name: "network", Do: b.network}, // ends with the namespace
		{Name: "enter", Do: b.enter},
		{Name: "sentry", Do: b.run},
	}
}

// What the sentry, its gofer and the helpers of commands may take beside the sandbox.
const (
	sentryMemory = 256 << 20
	sentryPids   = 512
)

// groupLimits bound the sentry with all that runs in it. A process inside is one outside,
// and a thread of the sentry where it waits.
func groupLimits(l dsec.Limits) cgroup.Limits {
	g := cgroup.Limits{CPU: l.CPU, Weight: l.CPUWeight, Devices: cgroup.DefaultDevices()}
	if l.Memory > 0 {
		g.Memory = l.Memory + sentryMemory
	}
	if l.Pids > 0 {
		g.Pids = 4*l.Pids + sentryPids
	}
	return g
}

func (b *build) spawn(ctx context.Context) (err error) {
	p := b.group.Paths()
	b.shell, err = b.r.hold.Spawn(ctx, hold.SpawnSpec{ID: b.name, UIDBase: b.rec.UID, GIDBase: b.rec.UID, Count: accounts.IDs, Cgroup: p.Unified, Tasks: p.Tasks,
		Lo: true, Account: hold.Account{OOM: p.OOM, Limit: p.Limit, Peak: p.Peak, Throttle: p.Throttle}})
	return err
}

func (b *build) linked() bool { return !b.quiet && b.rec.Request.Spec.HasLink() }

func (b *build) network(ctx context.Context) (err error) {
	b.lease = netpolicy.Lease{Mode: dsec.NetworkNone}
	// One that was made without a network has none, whatever its policy became.
	if !b.linked() {
		return nil
	}
	number, err := b.group.Number()
	if err != nil {
		return err
	}
	at := netpolicy.Place{NetNS: b.shell.NetNS, Group: number, Rate: b.rec.Request.Spec.Limits.Bandwidth, Link: true}
	b.lease, err = b.r.cfg.Network.Attach(ctx, b.sb.ID, b.rec.policy(), at)
	return err
}

// saved reports whether the disk has an archive of the upper layer.
func (b *build) saved() bool {
	return unix.Faccessat(int(b.dir.Fd()), upperFile, unix.F_OK, unix.AT_SYMLINK_NOFOLLOW) == nil
}

// errUnseen: to the machine's kernel, all of it is one program.
var errUnseen = errors.New("what runs behind gvisor is no program of the machine's kernel")

func (b *build) main(ctx context.Context) error {
	b.sb.saved = false
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
	if b.r.cfg.Unseen != nil {
		b.r.cfg.Unseen(b.sb.ID, errUnseen)
	}
	if early != nil {
		b.r.end(b.sb, *early)
	}
	return nil
}

package microvm

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"slices"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/confine"
	"github.com/opendsec/dsec/guest"
	"github.com/opendsec/dsec/internal/cgroup"
	"github.com/opendsec/dsec/internal/lifecycle"
	"github.com/opendsec/dsec/netpolicy"
	"github.com/opendsec/dsec/process"
	"github.com/opendsec/dsec/runtime"
	"github.com/opendsec/dsec/runtime/microvm/vmm"
	"github.com/opendsec/dsec/runtime/tier"
)

// build is a sandbox on its way to running.
type build struct {
	r   *Runtime
	sb  *sandbox
	rec *record

	machinery Machinery
	layers    *backing
	tap       *os.File

	from string // directory of a machine that it goes on as; "": it is a clone
	read []bool // of its layers, then
}

func (b *build) close() {
	if b.layers != nil {
		b.layers.letGo()
	}
	if b.tap != nil {
		_ = b.tap.Close()
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
		if sb.GetPhase() == tier.Removing {
			return nil, dsec.Errorf(dsec.Conflict, op, string(req.ID), "one of that id is being removed")
		}
		return nil, tier.SameRequest(op, rec.Request, req)
	}
	select {
	case r.slots <- struct{}{}:
		defer func() { <-r.slots }()
	case <-ctx.Done():
		r.forget(sb)
		return nil, dsec.E(dsec.ClassOf(ctx.Err()), op, string(req.ID), context.Cause(ctx))
	}
	b := &build{r: r, sb: sb, rec: &record{Request: req, Begun: time.Now().UTC(), Starts: 1, MachineID: newMachineID()}}
	defer b.close()
	sb.beginMaking()
	steps := append([]lifecycle.Step{b.state(), b.newDisk()}, b.begin()...)
	if req.From != "" {
		steps = append([]lifecycle.Step{b.state()}, b.fork()...)
	}
	took, err := lifecycle.Run(ctx, "microvm.create", steps...)
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
	if len(req.Layers.Layers) == 0 {
		return dsec.Errorf(dsec.Invalid, op, string(req.ID), "no layers")
	}
	profile, err := confine.ParseProfile(req.Spec.Profile)
	if err != nil {
		return dsec.E(dsec.Invalid, op, string(req.ID), err)
	}
	if capsOf(profile)&guest.Withheld != 0 {
		return dsec.Errorf(dsec.Unsupported, op, string(req.ID), "tier %s does not give the capabilities of the profile %s; in a container it does", dsec.TierMicroVM, profile)
	}
	if req.From != "" {
		if err := checkMoment(req.From); err != nil {
			return err
		}
	}
	switch {
	case len(req.Spec.Phases) > 0:
		return dsec.Errorf(dsec.Unsupported, op, string(req.ID), "tier %s has no phases", dsec.TierMicroVM)
	case len(req.Spec.Mounts) > 0:
		return dsec.Errorf(dsec.Unsupported, op, string(req.ID), "tier %s shows no host directories", dsec.TierMicroVM)
	case len(req.Spec.Watch) > 0:
		return dsec.Errorf(dsec.Unsupported, op, string(req.ID), "tier %s does not see what is written to paths that are watched", dsec.TierMicroVM)
	case req.Spec.HasLink() && r.cfg.Network == nil:
		return dsec.Errorf(dsec.Unsupported, op, string(req.ID), "this node has no network for sandboxes")
	}
	return nil
}

// state writes down what was asked for, before anything else exists.
func (b *build) state() lifecycle.Step {
	return lifecycle.Step{Name: "state", Do: func(context.Context) error {
		dir := b.r.dir(b.sb.ID)
		err := os.Mkdir(dir, 0o700)
		if err == nil {
			err = writeRecord(dir, b.rec)
		}
		if err != nil {
			return dsec.E(dsec.Internal, "write state of sandbox", string(b.sb.ID), errors.Join(err, os.RemoveAll(dir)))
		}
		b.setRecord(b.rec)
		return nil
	}, Undo: func(context.Context) error { return b.r.removeState(b.sb.ID) }}
}

func (b *build) setRecord(rec *record) {
	b.sb.Mu.Lock()
	defer b.sb.Mu.Unlock()
	b.sb.rec = rec
}

func (r *Runtime) removeState(id dsec.SandboxID) error {
	if err := os.RemoveAll(r.dir(id)); err != nil {
		return dsec.E(dsec.Internal, "remove state of sandbox", string(id), err)
	}
	return nil
}

func shared(id dsec.SandboxID) string { return Prefix + string(id) }

func (b *build) newDisk() lifecycle.Step {
	name := shared(b.sb.ID)
	return lifecycle.Step{Name: "disk", Do: func(ctx context.Context) error {
		if err := checkShape(b.rec.Request.Spec, len(b.rec.Request.Layers.Layers)); err != nil {
			return err
		}
		return b.r.makeDisk(ctx, name, b.rec.Request.Spec.Limits.Disk)
	}, Undo: func(ctx context.Context) error { return b.r.disks.Remove(ctx, name) }}
}

// begin are the steps that creation and start have in common: from a disk to a running sandbox.
func (b *build) begin() []lifecycle.Step {
	return []lifecycle.Step{
		{Name: "kernel", Do: func(ctx context.Context) (err error) {
			b.machinery, err = b.r.open(ctx)
			return err
		}},
		{Name: "layers", Do: b.back},
		{Name: "cgroup", Do: func(context.Context) error { return b.cgroup(shared(b.sb.ID)) },
			Undo: func(ctx context.Context) error {
				b.sb.Mu.Lock()
				b.sb.group = nil
				b.sb.Mu.Unlock()
				return b.r.groups.Remove(ctx, shared(b.sb.ID))
			}},
		{Name: "network", Do: b.network, Undo: func(ctx context.Context) error { return b.r.hold.Drop(ctx, netName(b.sb.ID)) }},
		{Name: "machine", Do: b.machine, Undo: b.sb.endMachine},
		{Name: "resume", Do: func(ctx context.Context) error { return b.r.begin(ctx, b.sb, b.rec) }},
		{Name: "root", Do: b.mount},
		{Name: "main", Do: b.main},
	}
}

func (b *build) back(ctx context.Context) (err error) {
	b.layers, err = b.r.back(ctx, b.machinery, b.rec.Request, b.read)
	if err == nil {
		b.rec.Read = b.layers.read
	}
	return err
}

// groupLimits are what the monitor of a sandbox's machine may use.
func groupLimits(l dsec.Limits, memory int64) cgroup.Limits {
	return cgroup.Limits{CPU: l.CPU, Weight: l.CPUWeight, Memory: memory + hostOwn, Pids: hostPids}
}

func (b *build) cgroup(name string) error {
	g, err := b.r.groups.Create(name, groupLimits(b.rec.Request.Spec.Limits, b.layers.shape.Memory))
	if err != nil {
		return err
	}
	b.sb.Mu.Lock()
	b.sb.group = g
	b.sb.Mu.Unlock()
	return nil
}

func (b *build) network(ctx context.Context) (err error) {
	b.rec.Lease = nil
	// One that was made without a network has none, whatever its policy became.
	if !b.rec.Request.Spec.HasLink() {
		return nil
	}
	b.tap, b.rec.Lease, err = b.r.connectNet(ctx, b.sb, b.rec)
	if err != nil {
		return err
	}
	if err = writeRecord(b.r.dir(b.sb.ID), b.rec); err != nil { // the next process tells the guest of it
		err = errors.Join(dsec.E(dsec.Internal, "write state of sandbox", string(b.sb.ID), err), b.r.hold.Drop(context.WithoutCancel(ctx), netName(b.sb.ID)))
	}
	return err
}

func (b *build) machine(ctx context.Context) error {
	start := b.r.clone
	if b.rec.Request.Spec.Boot == dsec.BootCold {
		start = b.r.cold
	}
	m, err := start(ctx, b.machinery, b.layers, cloneOf{name: string(b.sb.ID), disk: shared(b.sb.ID), tap: b.tap})
	if err != nil {
		return err
	}
	b.sb.Mu.Lock()
	b.sb.machine = m
	b.sb.Mu.Unlock()
	return nil
}

// cold starts a machine whose kernel boots, and waits for its agent.
func (r *Runtime) cold(ctx context.Context, m Machinery, l *backing, of cloneOf) (vmm.VM, error) {
	dir, err := r.disks.Open(ctx, of.disk)
	if err != nil {
		return nil, err
	}
	defer func() { _ = dir.Close() }()
	vm, err := m.VMM.Start(ctx, l.shape, vmm.Devices{Name: of.name, Pmem: l.slots, Disk: diskPath(dir), Blocks: l.blocks, Tap: of.tap})
	if err != nil {
		return nil, err
	}
	c, err := connectWithin(ctx, vm.Channel(), bootTime, guest.Options{})
	if err != nil {
		vm.Kill()
		return nil, dsec.E(dsec.ClassOf(err), "boot", "virtual machine", errors.Join(err, vm.Err()))
	}
	return vm, c.Close()
}

// cloneOf is what one machine is given.
type cloneOf struct {
	name string
	disk string // in the pool
	tap  *os.File
}

// clone starts a machine with a name from the template of its shape.
func (r *Runtime) clone(ctx context.Context, m Machinery, l *backing, of cloneOf) (vmm.VM, error) {
	dir, err := r.disks.Open(ctx, of.disk)
	if err != nil {
		return nil, err
	}
	defer func() { _ = dir.Close() }()
	t, err := m.VMM.BuildTemplate(ctx, l.shape, ready)
	if err != nil {
		return nil, err
	}
	return m.VMM.Clone(ctx, t, vmm.Devices{Name: of.name, Pmem: l.slots, Disk: diskPath(dir), Blocks: l.blocks, Tap: of.tap})
}

func (b *build) mount(ctx context.Context) error {
	c, err := b.r.session(ctx, b.sb)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, mountTime)
	defer cancel()
	m := mountOf(b.rec)
	for _, dir := range []string{path.Join("/", b.rec.Request.Layers.Config.Workdir), cmp.Or(b.rec.Request.Spec.Workdir, "/")} {
		if dir != "/" {
			m.Dirs = append(m.Dirs, dir)
		}
	}
	return c.Mount(ctx, m)
}

// mountOf is the root of a sandbox, as its guest is told to make it.
func mountOf(rec *record) guest.Mount {
	var m guest.Mount
	slot, disk := 0, 1 // the first disk is the writable one
	for i, l := range rec.Request.Layers.Layers {
		fs := guest.FileSystem{FSType: "erofs", Source: fmt.Sprintf("slot:%d", slot), Target: fmt.Sprintf("layer%d", i), Options: []string{"ro", "noatime"}}
		slot++
		switch {
		case l.DataSize > 0 && rec.Read[i]:
			fs.Options = append(fs.Options, fmt.Sprintf("device=disk:%d", disk))
			disk++
		case l.DataSize > 0:
			fs.Options = append(fs.Options, fmt.Sprintf("device=slot:%d", slot), "dax=always")
			slot++
			fs.DAX = "required"
		}
		m.Mounts = append(m.Mounts, fs)
		m.Overlay.Lowers = append(m.Overlay.Lowers, fs.Target)
	}
	slices.Reverse(m.Overlay.Lowers)
	// Not with discard: btrfs counts an extent that was given back in part whole, so that a disk which is filled, emptied and
	// filled again would be refused what is its own. It keeps the most that it ever held.
	m.Mounts = append(m.Mounts, guest.FileSystem{FSType: "ext4", Source: "disk:0", Target: "disk", Options: []string{"noatime"}})
	m.Overlay.Upper, m.Overlay.Work = "disk/upper", "disk/work"
	spec, image := rec.Request.Spec, rec.Request.Layers.Config
	m.Defaults = guest.Defaults{User: cmp.Or(spec.User, image.User), Cwd: cmp.Or(spec.Workdir, path.Join("/", image.Workdir)),
		ImageEnv: netpolicy.WithMirror(image.Env, rec.policy()), Env: spec.Env}
	m.Limits = guest.Limits{Memory: spec.Limits.Memory, Pids: spec.Limits.Pids, Spool: spoolSize(spec.Limits)}
	return m
}

const mainID = "main"

// mainProcess is what the sandbox runs: the image's entry point, if it has one, with what the
// caller asked for.
func mainProcess(req runtime.Request) process.Spec {
	return process.Spec{ID: mainID, Main: true, Argv: slices.Concat(req.Layers.Config.Entrypoint, req.Spec.Command)}
}

func (b *build) main(ctx context.Context) error {
	if len(b.rec.Request.Spec.Command) > 0 {
		if _, err := b.r.start(ctx, b.sb, mainProcess(b.rec.Request)); err != nil {
			return err
		}
	}
	return b.done(ctx)
}

// done says that the sandbox runs.
func (b *build) done(context.Context) error {
	rec := *b.rec
	rec.Ready = rec.Starts
	if err := writeRecord(b.r.dir(b.sb.ID), &rec); err != nil {
		return dsec.E(dsec.Internal, "write state of sandbox", string(b.sb.ID), err)
	}
	b.r.isRunning(b.sb, &rec)
	return nil
}

// isRunning marks a sandbox so, and watches it.
func (r *Runtime) isRunning(sb *sandbox, rec *record) {
	sb.Mu.Lock()
	early := sb.early
	sb.rec, sb.Phase, sb.exit, sb.early = rec, tier.Running, nil, nil
	m := sb.machine
	sb.Mu.Unlock()
	r.watch(sb, m)
	if early != nil {
		r.end(sb, *early)
	}
}

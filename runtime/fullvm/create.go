package fullvm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/confine"
	"github.com/opendsec/dsec/internal/cgroup"
	"github.com/opendsec/dsec/internal/diskpool"
	"github.com/opendsec/dsec/internal/fault"
	"github.com/opendsec/dsec/internal/lifecycle"
	"github.com/opendsec/dsec/internal/linux"
	"github.com/opendsec/dsec/internal/qcow2"
	"github.com/opendsec/dsec/process"
	"github.com/opendsec/dsec/runtime"
	"github.com/opendsec/dsec/runtime/microvm/vmm"
	"github.com/opendsec/dsec/runtime/tier"
)

const (
	diskFile  = "disk.qcow2"
	minMemory = 64 << 20
	// What QEMU may use beside the memory of the guest: itself, translated code, caches.
	overhead = 512 << 20
	threads  = 512
	mainID   = "main"
)

// build is a sandbox on its way to running. The files are closed when the way ends.
type build struct {
	r    *Runtime
	sb   *sandbox
	rec  *record
	dir  *os.File // on the disk pool
	base *base
}

func (b *build) close() {
	if b.dir != nil {
		_ = b.dir.Close()
	}
	if b.base != nil {
		_ = b.base.disk.Close()
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
	b := &build{r: r, sb: sb, rec: &record{Format: recordFormat, Request: req, Begun: time.Now().UTC(), Starts: 1}}
	defer b.close()
	sb.SetPhase(tier.Making)
	took, err := lifecycle.Run(ctx, "fullvm.create", append([]lifecycle.Step{b.state(), b.layers(), b.disk()}, b.begin()...)...)
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
	s := &req.Spec
	no := func(format string, args ...any) error {
		return dsec.Errorf(dsec.Unsupported, op, string(req.ID), "the %s tier %s", r.Tier(), fmt.Sprintf(format, args...))
	}
	p, err := confine.ParseProfile(s.Profile)
	if err != nil {
		return dsec.E(dsec.Invalid, op, string(req.ID), err)
	}
	switch {
	case s.HasLink():
		return no("has no network yet; ask for network none")
	case len(s.Mounts) > 0:
		return no("shows no directories of the host")
	case len(s.Watch) > 0:
		return no("does not see what is written to paths that are watched")
	case len(s.Phases) > 0:
		return no("has no phases")
	case s.Limits.Memory < minMemory:
		return dsec.Errorf(dsec.Invalid, op, string(req.ID), "a machine with %d bytes of memory, at least %d", s.Limits.Memory, minMemory)
	}
	if err := tier.MachineFits(op, string(req.ID), s.Limits.Memory); err != nil {
		return err
	}
	return confine.Require(p, r.Tier())
}

// state writes down what was asked for before anything else exists.
func (b *build) state() lifecycle.Step {
	return lifecycle.Step{Name: "state", Do: func(context.Context) error {
		if err := os.Mkdir(b.r.dir(b.sb.ID), 0o700); err != nil {
			return dsec.E(fault.Class(err, dsec.Internal), "make state of sandbox", string(b.sb.ID), err)
		}
		if err := b.r.write(b.rec); err != nil {
			return errors.Join(err, b.r.removeState(b.sb.ID))
		}
		b.sb.Mu.Lock()
		b.sb.rec = b.rec
		b.sb.Mu.Unlock()
		return nil
	}, Undo: func(context.Context) error { return b.r.removeState(b.sb.ID) }}
}

// restate is state of a start.
func (b *build) restate() lifecycle.Step {
	return lifecycle.Step{Name: "state", Do: func(context.Context) error {
		return b.update(func(rec *record) {
			rec.Stopped, rec.Paused, rec.Exit, rec.Begun, rec.Starts = false, false, nil, time.Now().UTC(), rec.Starts+1
		})
	}, Undo: func(context.Context) error {
		return b.update(func(rec *record) { rec.Stopped = true })
	}}
}

func (b *build) update(f func(rec *record)) error {
	if err := b.r.change(b.sb, f); err != nil {
		return err
	}
	b.rec = b.sb.record()
	return nil
}

func (b *build) layers() lifecycle.Step {
	return lifecycle.Step{Name: "layers", Do: func(ctx context.Context) (err error) {
		if err := b.r.useLayers(ctx, b.sb, b.rec); err != nil {
			return err
		}
		if b.base, err = b.r.openBase(b.sb, b.rec); err == nil {
			err = b.look()
		}
		if err != nil {
			b.r.cfg.Mounts.Unuse(string(b.sb.ID))
		}
		return err
	}, Undo: func(context.Context) error { b.r.cfg.Mounts.Unuse(string(b.sb.ID)); return nil }}
}

// look writes down what the image is, and refuses what it cannot do.
func (b *build) look() error {
	m := b.base.manifest
	if !m.Agent && len(b.rec.Request.Spec.Command) > 0 {
		return b.r.noAgent("run the main command", b.sb.ID)
	}
	return b.update(func(rec *record) { rec.Image = m })
}

func (b *build) disk() lifecycle.Step {
	id := string(b.sb.ID)
	return lifecycle.Step{Name: "disk", Do: func(ctx context.Context) (err error) {
		b.dir, err = b.r.cfg.Disks.Create(ctx, id, b.rec.Request.Spec.Limits.Disk, diskpool.Owner{})
		if err != nil {
			return err
		}
		if err := makeOverlay(b.dir, b.rec.Image.Size); err != nil {
			return errors.Join(err, b.r.cfg.Disks.Remove(context.WithoutCancel(ctx), id))
		}
		return nil
	}, Undo: func(ctx context.Context) error { return b.r.cfg.Disks.Remove(ctx, id) }}
}

// reopen is disk of a start.
func (b *build) reopen() lifecycle.Step {
	return lifecycle.Step{Name: "disk", Do: func(ctx context.Context) (err error) {
		b.dir, err = b.r.cfg.Disks.Open(ctx, string(b.sb.ID))
		return err
	}}
}

func makeOverlay(dir *os.File, size int64) error {
	f, err := os.OpenFile(inside(dir, diskFile), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err == nil {
		linux.WriteInPlace(f)
		err = errors.Join(qcow2.Create(f, size), f.Close())
	}
	if err != nil {
		return dsec.E(fault.Class(err, dsec.Internal), "make", diskFile, err)
	}
	return nil
}

// inside is the path of what is in an open directory.
func inside(dir *os.File, name string) string {
	return filepath.Join(fmt.Sprintf("/proc/self/fd/%d", dir.Fd()), name)
}

// begin are the steps that creation and start have in common.
func (b *build) begin() []lifecycle.Step {
	return []lifecycle.Step{
		{Name: "cgroup", Do: b.cgroup, Undo: func(ctx context.Context) error { return b.r.removeGroup(ctx, b.sb) }},
		{Name: "boot", Do: b.boot, Undo: func(context.Context) error { b.r.off(b.sb); return nil }},
		{Name: "agent", Do: b.agent},
		{Name: "main", Do: b.main},
		{Name: "made", Do: b.made},
	}
}

func (b *build) cgroup(context.Context) error {
	s, err := b.r.shape(b.rec)
	if err != nil {
		return err
	}
	l := b.rec.Request.Spec.Limits
	g, err := b.r.cfg.Groups.Create(string(b.sb.ID), cgroup.Limits{CPU: l.CPU, Weight: l.CPUWeight, Memory: s.Memory + overhead, Pids: threads, Devices: cgroup.DefaultDevices()})
	if err != nil {
		return err
	}
	b.sb.Mu.Lock()
	b.sb.group = g
	b.sb.Mu.Unlock()
	return nil
}

func (r *Runtime) removeGroup(ctx context.Context, sb *sandbox) error {
	sb.Mu.Lock()
	sb.group = nil
	sb.Mu.Unlock()
	return r.cfg.Groups.Remove(ctx, string(sb.ID))
}

func (b *build) boot(ctx context.Context) error {
	s, err := b.r.shape(b.rec)
	if err != nil {
		return err
	}
	vm, err := b.r.cfg.Machines.Start(ctx, s, vmm.Devices{Name: b.sb.machine(), Disk: inside(b.dir, diskFile), Base: b.base.disk})
	if err != nil {
		return err
	}
	return b.r.attend(b.sb, vm)
}

// agent waits until the guest has booted so far that commands can be run.
func (b *build) agent(ctx context.Context) error {
	if !b.rec.Image.Agent {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, b.r.cfg.AgentTime)
	defer cancel()
	_, err := b.sb.await(ctx)
	if err != nil {
		if err := b.stuck(); err != nil {
			return err
		}
		console := tailOf(b.sb.machineNow().Console())
		return dsec.Errorf(dsec.ClassOf(err), "boot", "virtual machine", "its agent has not answered: %w; its console: %s", err, console)
	}
	return nil
}

func (b *build) main(ctx context.Context) error {
	argv := b.rec.Request.Spec.Command
	if len(argv) == 0 {
		return nil
	}
	c, err := b.sb.await(ctx)
	if err != nil {
		return err
	}
	p, err := c.Exec(ctx, command(b.rec, process.Spec{ID: mainID, Argv: argv, Main: true}))
	if err == nil {
		b.r.watchCommand(b.sb, c, p)
	}
	return err
}

// stuck is why a machine was killed on its way, if its disk could not be written.
func (b *build) stuck() error {
	b.sb.Mu.Lock()
	defer b.sb.Mu.Unlock()
	if x := b.sb.early; x != nil {
		switch x.Cause {
		case dsec.CauseDiskFull, dsec.CauseInfraCapacity:
			return dsec.Errorf(dsec.NoSpace, "boot", "virtual machine", "%s", strings.Join(x.Evidence, "; "))
		case dsec.CauseInfraDisk:
			return dsec.Errorf(dsec.Unavailable, "boot", "virtual machine", "%s", strings.Join(x.Evidence, "; "))
		}
	}
	return nil
}

// made is the end of the way, unless the machine has ended before. What the main command did meanwhile is told now.
func (b *build) made(context.Context) error {
	if err := b.update(func(rec *record) { rec.Made = rec.Starts }); err != nil {
		return err
	}
	if err := b.stuck(); err != nil {
		return err
	}
	b.sb.Mu.Lock()
	select {
	case <-b.sb.vm.Done():
		defer b.sb.Mu.Unlock()
		return dsec.E(dsec.Unavailable, "boot", "virtual machine", b.sb.vm.Err())
	default:
	}
	early, c := b.sb.early, b.sb.client
	b.sb.Phase, b.sb.Stopping, b.sb.early = tier.Running, false, nil
	b.sb.Mu.Unlock()
	if early != nil && b.r.end(b.sb, *early) {
		b.r.tasks.Go(func() { b.r.finish(b.sb, c) })
	}
	return nil
}

// Start runs a stopped sandbox again on its disk.
func (r *Runtime) Start(ctx context.Context, id dsec.SandboxID) ([]dsec.Step, error) {
	const op = "start sandbox"
	sb, err := r.acquire(ctx, op, id)
	if err != nil {
		return nil, err
	}
	defer sb.Leave()
	switch sb.GetPhase() {
	case tier.Running:
		return nil, nil
	case tier.Ended: // starting acknowledges the end as stopping does
		hctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), lifecycle.UndoLimit)
		err := r.halt(hctx, sb)
		cancel()
		if err != nil {
			return nil, tier.Wrap(op, id, err)
		}
	}
	b := &build{r: r, sb: sb, rec: sb.record()}
	defer b.close()
	sb.SetPhase(tier.Making)
	took, err := lifecycle.Run(ctx, "fullvm.start", append([]lifecycle.Step{b.restate(), b.layers(), b.reopen()}, b.begin()...)...)
	if err != nil {
		sb.SetPhase(tier.Stopped)
		return took, tier.Wrap(op, id, err)
	}
	return took, nil
}

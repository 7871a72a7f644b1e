package container

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/files"
	"github.com/opendsec/dsec/internal/accounts"
	"github.com/opendsec/dsec/internal/cgroup"
	"github.com/opendsec/dsec/internal/hold"
	"github.com/opendsec/dsec/internal/lifecycle"
	"github.com/opendsec/dsec/rootfs"
	"github.com/opendsec/dsec/runtime/tier"
)

const (
	// diskSuffix makes the name of the shell in which the file service of a
	// sandbox without processes runs.
	diskSuffix = ".disk"

	// filesGroup is the control group of all file helpers; they are the node's own
	// processes and not charged to a sandbox.
	filesGroup = "files"
)

// fileCaps is what root holds on files: chown, dac_override, dac_read_search,
// fowner, fsetid, mknod, setfcap.
const fileCaps = 1<<0 | 1<<1 | 1<<2 | 1<<3 | 1<<4 | 1<<27 | 1<<31

// shellLimits of a disk shell, which is only its PID 1.
var shellLimits = cgroup.Limits{Memory: 32 << 20, Pids: 16, Devices: cgroup.DefaultDevices()}

// Files opens the file service as a user. The same user gets the same service;
// who that is was decided when it was opened.
func (r *Runtime) Files(ctx context.Context, id dsec.SandboxID, user string) (files.FS, error) {
	sb, err := r.boxes.FindInside("open files of sandbox", id)
	if err != nil {
		return nil, err
	}
	_, who, err := r.reach(ctx, sb, user)
	if err != nil {
		return nil, err
	}
	s := &tier.FileService{Explain: sb.ExplainFiles, Open: func(ctx context.Context) (*files.Redialing, error) { return r.serviceOf(ctx, sb, who) }}
	_, err = s.Open(ctx)
	return s, err
}

// serviceOf returns the connection of a user, made if there is none since the sandbox last
// changed its state.
func (r *Runtime) serviceOf(ctx context.Context, sb *sandbox, who accounts.Identity) (*files.Redialing, error) {
	if sb.Gone() {
		return nil, dsec.Errorf(dsec.SandboxGone, "open files of sandbox", string(sb.ID), "the sandbox has ended")
	}
	dial := func(ctx context.Context) (io.ReadWriteCloser, error) {
		shell, _, err := r.reach(ctx, sb, "0")
		if err != nil {
			return nil, err
		}
		return r.helper(ctx, sb, shell, who)
	}
	return sb.services.Get(ctx, fmt.Sprint(who.UID, who.GID, who.Groups), nil, func(context.Context) (*files.Redialing, error) { return files.NewRedialing(dial), nil })
}

// reach returns the shell through which a sandbox's files are reached, and who
// a user is there.
func (r *Runtime) reach(ctx context.Context, sb *sandbox, user string) (shell string, who accounts.Identity, err error) {
	const op = "open files of sandbox"
	rec := sb.record()
	if rec == nil {
		return "", who, dsec.Errorf(dsec.SandboxGone, op, string(sb.ID), "the sandbox has ended")
	}
	user = cmp.Or(user, rec.rights().User, rec.Request.Spec.User, rec.Request.Layers.Config.User)
	switch sb.GetPhase() {
	case tier.Running:
		if sb.isMoving() {
			return "", who, betweenPhases(op, sb)
		}
		who, err = r.identify(ctx, sb, user)
		return string(sb.ID), who, err
	case tier.Stopped, tier.Ended:
		if shell, err = r.diskShell(ctx, sb); err != nil {
			return "", who, err
		}
		who, err = r.identifyIn(ctx, shell, user)
		return shell, who, err
	case tier.Making:
		return "", who, dsec.Errorf(dsec.IllegalState, op, string(sb.ID), "the sandbox is being made")
	}
	return "", who, dsec.Errorf(dsec.SandboxGone, op, string(sb.ID), "the sandbox has ended")
}

// helper starts a file helper and connects to it.
func (r *Runtime) helper(ctx context.Context, sb *sandbox, shell string, who accounts.Identity) (net.Conn, error) {
	g, err := r.groups.Service(filesGroup)
	if err != nil {
		return nil, err
	}
	p := g.Paths()
	var caps hold.Caps
	if who.UID == 0 {
		caps = hold.Caps{Bounding: fileCaps, Permitted: fileCaps}
	}
	sock, err := r.hold.StartFiles(ctx, hold.FilesSpec{Sandbox: shell, UID: who.UID, GID: who.GID, Groups: who.Groups,
		Caps: caps, Cgroup: p.Unified, Tasks: p.Tasks})
	if err != nil {
		return nil, r.explain("open files of sandbox", sb, err)
	}
	defer sock.Close()
	c, err := net.FileConn(sock)
	if err != nil {
		return nil, dsec.E(dsec.Internal, "open files of sandbox", string(sb.ID), err)
	}
	return c, nil
}

// diskShell makes a shell that has the root of a sandbox without processes,
// unless there is one.
func (r *Runtime) diskShell(ctx context.Context, sb *sandbox) (string, error) {
	const op = "open disk of sandbox"
	name := string(sb.ID) + diskSuffix
	if err := sb.Enter(ctx, op); err != nil {
		return "", err
	}
	defer sb.Leave()
	p := sb.GetPhase()
	if p != tier.Stopped && p != tier.Ended {
		return "", dsec.Errorf(dsec.Unavailable, op, string(sb.ID), "the sandbox changed its state during the call")
	}
	if sb.hasDisk {
		return name, nil
	}
	// Two mounts of one upper at a time would spoil it: the last one has to be gone.
	if err := r.hold.KillSandbox(ctx, string(sb.ID)); err != nil {
		return "", r.wrap(op, sb.ID, err)
	}
	sb.closeRoot()
	b := &build{r: r, sb: sb, rec: sb.record()}
	defer b.close()
	_, err := lifecycle.Run(ctx, "container.disk", b.diskSteps(name)...)
	if err != nil {
		return "", r.wrap(op, sb.ID, err)
	}
	sb.hasDisk = true
	return name, nil
}

func (b *build) diskSteps(name string) []lifecycle.Step {
	var g *cgroup.Group
	return []lifecycle.Step{
		{Name: "disk", Do: func(ctx context.Context) (err error) {
			if b.dir, err = b.r.disks.Open(ctx, string(b.sb.ID)); err != nil {
				return err
			}
			return b.prepareDir()
		}},
		{Name: "cgroup", Do: func(context.Context) (err error) {
			g, err = b.r.groups.Create(name, shellLimits)
			return err
		}, Undo: func(ctx context.Context) error { return b.r.groups.Remove(ctx, name) }},
		{Name: "layers", Do: func(ctx context.Context) error {
			return b.r.mounts.Use(ctx, name, b.rec.Request.Layers.Layers)
		}, Undo: func(context.Context) error { b.r.mounts.Unuse(name); return nil }},
		{Name: "spawn", Do: func(ctx context.Context) (err error) {
			s := spawnSpec(name, g, b.rec.UID)
			s.Bare = true
			b.shell, err = b.r.hold.Spawn(ctx, s)
			return err
		}, Undo: func(ctx context.Context) error { return b.r.hold.RemoveSandbox(ctx, name) }},
		{Name: "root", Do: func(context.Context) (err error) {
			b.root, err = b.r.mounts.Stack(rootfs.Root{User: name, Layers: digests(b.rec.Request.Layers), UserNS: b.shell.UserNS, Dir: b.dir})
			return err
		}},
		{Name: "enter", Do: func(ctx context.Context) error {
			return b.r.hold.Enter(ctx, hold.EnterSpec{ID: name, Root: b.root})
		}},
	}
}

// closeDiskShell removes the shell, if there is one; the caller has the turn.
func (r *Runtime) closeDiskShell(ctx context.Context, sb *sandbox) error {
	if !sb.hasDisk {
		return nil
	}
	sb.services.Close()
	name := string(sb.ID) + diskSuffix
	err := errors.Join(r.hold.RemoveSandbox(ctx, name), r.groups.Remove(ctx, name))
	r.mounts.Unuse(name)
	if err == nil {
		sb.hasDisk = false
	}
	return err
}

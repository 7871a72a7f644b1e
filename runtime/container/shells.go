package container

import (
	"context"
	"errors"
	"slices"
	"sync"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/cgroup"
	"github.com/opendsec/dsec/internal/hold"
	"github.com/opendsec/dsec/internal/lifecycle"
)

// shell is what a sandbox is before it has a root: namespaces with a PID 1 in
// them, a uid range, a control group, /proc, /sys and /dev. Nothing of any image
// or sandbox was ever in it.
type shell struct {
	name  string // of its group, and in the hold until Enter
	shape dsec.Limits
	uid   uint32
	group *cgroup.Group
	ns    *hold.Shell
}

// shapeOf is what of a sandbox's limits its shell is made with.
func shapeOf(l dsec.Limits) dsec.Limits {
	l.Disk, l.Output = 0, 0
	return l
}

// shells keeps some that were never used, so that a creation need not wait for
// the kernel to make namespaces. A shell is used once, and goes with its sandbox.
// They have the limits that were asked for last, as the sandboxes of one job do.
type shells struct {
	r    *Runtime
	most int

	mu    sync.Mutex
	want  dsec.Limits // shape asked for last
	ready []*shell    // oldest first
	wake  chan struct{}
}

func newShells(r *Runtime, most int) *shells {
	return &shells{r: r, most: most, wake: make(chan struct{}, 1)}
}

// take gives a shell of that shape to the caller, nil if none is ready.
func (p *shells) take(l dsec.Limits) *shell {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.most == 0 {
		return nil
	}
	p.want = shapeOf(l)
	select {
	case p.wake <- struct{}{}:
	default:
	}
	return p.pickLocked(func(s *shell) bool { return s.shape == p.want })
}

// pickLocked takes the oldest shell that fits out of ready, nil if none does.
func (p *shells) pickLocked(fits func(*shell) bool) *shell {
	i := slices.IndexFunc(p.ready, fits)
	if i < 0 {
		return nil
	}
	s := p.ready[i]
	p.ready = slices.Delete(p.ready, i, i+1)
	return s
}

// lost discards a shell whose PID 1 has ended.
func (p *shells) lost(ctx context.Context, name string) {
	p.mu.Lock()
	gone := p.pickLocked(func(s *shell) bool { return s.name == name })
	p.mu.Unlock()
	if gone != nil {
		p.r.discard(ctx, gone)
	}
}

// fill makes shells, one after the other, until the runtime is closed; then it
// removes what nobody took.
func (p *shells) fill() {
	for p.r.life.Err() == nil {
		select {
		case <-p.wake:
		case <-p.r.life.Done():
			continue
		}
		if !p.low() {
			continue
		}
		for p.r.life.Err() == nil && p.fillOne() {
		}
	}
	p.mu.Lock()
	left := p.ready
	p.ready, p.most = nil, 0
	p.mu.Unlock()
	for _, s := range left {
		p.r.discard(context.Background(), s)
	}
}

// low is true if it is time to fill up. Making a shell slows down the creations
// and starts beside it, so it is done in one go for many, not after each.
func (p *shells) low() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.countLocked(p.want) <= p.most/4
}

func (p *shells) countLocked(shape dsec.Limits) (n int) {
	for _, s := range p.ready {
		if s.shape == shape {
			n++
		}
	}
	return n
}

// fillOne makes one shell if one is wanted.
func (p *shells) fillOne() bool {
	p.mu.Lock()
	shape := p.want
	have := p.countLocked(shape)
	var old *shell
	if len(p.ready) >= p.most && have < p.most { // of a shape that is not asked for any more
		old = p.pickLocked(func(s *shell) bool { return s.shape != shape })
	}
	p.mu.Unlock()
	if old != nil {
		p.r.discard(p.r.life, old)
	}
	if have >= p.most {
		return false
	}
	s, err := p.r.newShell(p.r.life, shape)
	if err != nil {
		if p.r.life.Err() == nil {
			p.r.log.Warn("make a shell ahead", "err", err) // the creation that needs it will say why, to its caller
		}
		return false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ready = append(p.ready, s)
	return true
}

// newShell makes a shell that belongs to no sandbox yet.
func (r *Runtime) newShell(ctx context.Context, shape dsec.Limits) (*shell, error) {
	s := &shell{name: "shell." + dsec.Random(20), shape: shape}
	owner := dsec.SandboxID(s.name)
	_, err := lifecycle.Run(ctx, "container.shell", lifecycle.Step{Name: "uids", Do: func(context.Context) (err error) {
		s.uid, err = r.uids.take(owner)
		return err
	}, Undo: func(context.Context) error { r.uids.give(s.uid, owner); return nil }},
		lifecycle.Step{Name: "cgroup", Do: func(context.Context) (err error) {
			s.group, err = r.groups.Create(s.name, groupLimits(shape))
			return err
		}, Undo: func(ctx context.Context) error { return r.groups.Remove(ctx, s.name) }},
		lifecycle.Step{Name: "spawn", Do: func(ctx context.Context) (err error) {
			s.ns, err = r.spawn(ctx, s.name, s.group, s.uid, shape.Memory)
			return err
		}, Undo: func(ctx context.Context) error { return r.hold.RemoveSandbox(ctx, s.name) }})
	return s, err
}

// spawn makes the namespaces of a sandbox in a group, with the uids from first.
func (r *Runtime) spawn(ctx context.Context, name string, g *cgroup.Group, first uint32, memory int64) (*hold.Shell, error) {
	s := spawnSpec(name, g, first)
	s.Lo, s.Sysctls, s.Masks, s.ReadOnly = true, sysctls, r.masks, r.readOnly
	s.ShmSize = max(shmMin, memory/2)
	var err error
	if s.Sys, err = r.mounts.Plan().Clone(r.sys, nil); err != nil {
		return nil, dsec.E(dsec.Internal, "clone /sys for", name, err)
	}
	defer s.Sys.Close()
	return r.hold.Spawn(ctx, s)
}

// discard removes a shell that no sandbox has, or had when its creation failed.
func (r *Runtime) discard(ctx context.Context, s *shell) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), lifecycle.UndoLimit)
	defer cancel()
	s.close()
	err := errors.Join(r.hold.RemoveSandbox(ctx, s.name), r.groups.Remove(ctx, s.name))
	if err != nil { // the next process of ours finds it
		r.log.Warn("remove a shell", "shell", s.name, "err", err)
		return
	}
	r.uids.give(s.uid, dsec.SandboxID(s.name))
}

func (s *shell) close() {
	s.ns.UserNS.Close()
	s.ns.NetNS.Close()
}

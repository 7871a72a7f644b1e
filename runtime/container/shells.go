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
	"github.com/opendsec/dsec/netpolicy"
)

// shell is what a sandbox is before it has a root: namespaces with a PID 1 in
// them, a uid range, a control group, /proc, /sys and /dev, and maybe a link by
// which nothing passes yet. Nothing of any image or sandbox was ever in it.
type shell struct {
	name  string // of its group, and in the hold until Enter
	shape shape
	uid   uint32
	group *cgroup.Group
	ns    *hold.Shell
}

// shape is what shells differ in. One with a link is no shell for a sandbox without
// a network, which has loopback only.
type shape struct {
	limits dsec.Limits // those that a shell is made with
	linked bool
}

// shapeOf is the shape of a new sandbox's shell.
func (r *Runtime) shapeOf(s dsec.Spec) shape {
	l := s.LimitsIn(0)
	l.Disk, l.Output, l.Bandwidth = 0, 0, 0
	_, ahead := r.cfg.Network.(netpolicy.Preparer)
	linked := ahead && s.HasLink()
	if linked {
		l.Bandwidth = s.Limits.Bandwidth
	}
	return shape{l, linked}
}

// shells keeps some that were never used, so that a creation need not wait for
// the kernel to make namespaces. A shell is used once, and goes with its sandbox.
// They have the shapes that were asked for lately, each as many as its share, as the
// sandboxes of few jobs do: one that begins does not throw away what another needs.
type shells struct {
	r    *Runtime
	most int

	mu    sync.Mutex
	asked []shape  // lately, the last one last
	ready []*shell // oldest first
	wake  chan struct{}
}

// memory is of how many creations the shapes count.
const memory = 16

func newShells(r *Runtime, most int) *shells {
	return &shells{r: r, most: most, wake: make(chan struct{}, 1)}
}

// take gives a shell of that shape to the caller, nil if none is ready.
func (p *shells) take(of shape) *shell {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.most == 0 {
		return nil
	}
	p.askLocked(of)
	select {
	case p.wake <- struct{}{}:
	default:
	}
	return p.pickLocked(func(s *shell) bool { return s.shape == of })
}

func (p *shells) askLocked(of shape) {
	if p.asked = append(p.asked, of); len(p.asked) > memory {
		p.asked = slices.Delete(p.asked, 0, 1)
	}
}

// wantLocked is how many of a shape should be ready. All together are most.
func (p *shells) wantLocked(of shape) int {
	share := map[shape]int{}
	for _, s := range p.asked {
		share[s]++
	}
	want, sum := 0, 0
	for s, n := range share {
		sum += p.most * n / len(p.asked)
		if s == of {
			want = p.most * n / len(p.asked)
		}
	}
	if len(p.asked) > 0 && of == p.asked[len(p.asked)-1] {
		want += p.most - sum
	}
	return want
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
	return slices.ContainsFunc(p.asked, p.lowLocked)
}

func (p *shells) lowLocked(of shape) bool {
	have, want := p.countLocked(of), p.wantLocked(of)
	return have < want && have <= want/4
}

func (p *shells) countLocked(of shape) (n int) {
	for _, s := range p.ready {
		if s.shape == of {
			n++
		}
	}
	return n
}

// nextLocked is the shape to make a shell of, the one that most are missing of. If
// there are as many shells as there may be, one that nobody asks for any more gives
// way. One that is only too many does so for a shape that is low: else shares that
// change a little would cost shells.
func (p *shells) nextLocked() (next shape, old *shell, some bool) {
	missing := 0
	for _, s := range p.asked {
		if n := p.wantLocked(s) - p.countLocked(s); n > missing {
			next, missing = s, n
		}
	}
	if missing == 0 || len(p.ready) < p.most {
		return next, nil, missing > 0
	}
	low := p.lowLocked(next)
	old = p.pickLocked(func(s *shell) bool {
		want := p.wantLocked(s.shape)
		return want == 0 || low && p.countLocked(s.shape) > want
	})
	return next, old, old != nil
}

// fillOne makes one shell if one is wanted.
func (p *shells) fillOne() bool {
	p.mu.Lock()
	shape, old, some := p.nextLocked()
	p.mu.Unlock()
	if old != nil {
		p.r.discard(p.r.life, old)
	}
	if !some {
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
func (r *Runtime) newShell(ctx context.Context, of shape) (*shell, error) {
	s := &shell{name: "shell." + dsec.Random(20), shape: of}
	owner := dsec.SandboxID(s.name)
	_, err := lifecycle.Run(ctx, "container.shell", lifecycle.Step{Name: "uids", Do: func(context.Context) (err error) {
		s.uid, err = r.uids.Take(owner)
		return err
	}, Undo: func(context.Context) error { r.uids.Give(s.uid, owner); return nil }},
		lifecycle.Step{Name: "cgroup", Do: func(context.Context) (err error) {
			s.group, err = r.groups.Create(s.name, groupLimits(of.limits))
			return err
		}, Undo: func(ctx context.Context) error { return r.groups.Remove(ctx, s.name) }},
		lifecycle.Step{Name: "spawn", Do: func(ctx context.Context) (err error) {
			s.ns, err = r.spawn(ctx, s.name, s.group, s.uid, of.limits.Memory)
			return err
		}, Undo: func(ctx context.Context) error {
			if s.ns != nil {
				s.close()
			}
			return r.hold.RemoveSandbox(ctx, s.name)
		}},
		lifecycle.Step{Name: "network", Do: func(ctx context.Context) error { // ends with the namespace
			if !of.linked {
				return nil
			}
			at := netpolicy.Place{NetNS: s.ns.NetNS, Rate: of.limits.Bandwidth}
			return r.cfg.Network.(netpolicy.Preparer).Prepare(ctx, at)
		}})
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
	r.uids.Give(s.uid, dsec.SandboxID(s.name))
}

func (s *shell) close() {
	s.ns.UserNS.Close()
	s.ns.NetNS.Close()
}

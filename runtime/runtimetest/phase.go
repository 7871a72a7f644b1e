package runtimetest

import (
	"context"
	"maps"
	"path"
	"slices"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/failpoint"
	"github.com/opendsec/dsec/process"
	"github.com/opendsec/dsec/runtime"
)

var _ runtime.Phaser = (*Fake)(nil)

// CanPhase: the fake kills, hides and reveals. The rights that a kernel gives to a
// command it takes for granted, and limits nobody.
func (f *Fake) CanPhase(dsec.Spec) error { return nil }

// SetPhase moves a sandbox to another phase. In its middle is the failpoint
// "fake.phase".
func (f *Fake) SetPhase(ctx context.Context, id dsec.SandboxID, name string) (m runtime.Moved, err error) {
	const op = "set phase of sandbox"
	err = f.locked(ctx, op, id, func(b *box) error {
		i := b.req.Spec.PhaseIndex(name)
		if !b.isRunning() || i < 0 {
			return dsec.Errorf(dsec.IllegalState, op, string(id), "the sandbox is not running, or has no such phase")
		}
		if b.isIn(i) { // done, and not told
			b.clock.set(false)
			return nil
		}
		b.setMoving(name)
		m.Killed = b.killAll(b.req.Spec.Phases[i].EndServices)
		b.clock.set(true)
		if err := failpoint.Hit(ctx, "fake.phase"); err != nil {
			return err
		}
		b.fs.hide(b.req.Spec.HiddenIn(i))
		m.Network = b.arrive(i)
		b.clock.set(false)
		return nil
	})
	return m, err
}

// isIn says that it is in the i-th phase and on its way to none.
func (b *box) isIn(i int) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.moving == "" && b.phase == i
}

// arrive ends a move and returns the generation of the network, if phases have one.
func (b *box) arrive(i int) uint64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.phase, b.moving = i, ""
	if !b.req.Spec.PhasesNetwork() {
		return 0
	}
	b.network++
	return b.network
}

func (b *box) setMoving(to string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.moving = to
}

// killAll ends every process, services only if told to, and says how many there were.
func (b *box) killAll(services bool) (n int) {
	b.mu.Lock()
	procs := slices.Collect(maps.Values(b.procs))
	clear(b.ports)
	b.mu.Unlock()
	if !services {
		procs = slices.DeleteFunc(procs, func(p *proc) bool { return p.spec.Service })
	}
	b.clock.set(false)
	for _, p := range procs {
		if !p.ended() {
			n++
		}
		p.kill(process.Killed)
	}
	for _, p := range procs {
		<-p.done
		p.jobs.Wait()
	}
	return n
}

// hide takes what is at these paths away, and puts back what was taken from
// others; whatever has come to be there gives way.
func (fs *memFS) hide(paths []string) {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	if fs.hidden == nil {
		fs.hidden = map[string]*inode{}
	}
	for p, n := range fs.hidden {
		if slices.Contains(paths, p) {
			continue
		}
		if dir, err := fs.walk(user{}, path.Dir(p), true, maxLinks); err == nil && dir.isDir() {
			dir.children[path.Base(p)] = n
		}
		delete(fs.hidden, p)
	}
	for _, p := range paths {
		dir, err := fs.walk(user{}, path.Dir(p), true, maxLinks)
		if err != nil || !dir.isDir() || dir.children[path.Base(p)] == nil {
			continue
		}
		if fs.hidden[p] == nil {
			fs.hidden[p] = dir.children[path.Base(p)]
		}
		delete(dir.children, path.Base(p))
	}
}

package node

import (
	"context"
	"sync"

	"golang.org/x/sync/semaphore"
)

// packs are the disks that are being packed: so many at one time, and so many of
// one project.
type packs struct {
	all *semaphore.Weighted

	mu  sync.Mutex
	own map[string]*projectPack
}

type projectPack struct {
	*semaphore.Weighted
	users int // who holds or waits
}

func newPacks() *packs {
	return &packs{all: semaphore.NewWeighted(packsAtOnce), own: map[string]*projectPack{}}
}

// take waits for a place.
func (p *packs) take(ctx context.Context, project string) (done func(), err error) {
	p.mu.Lock()
	own := p.own[project]
	if own == nil {
		own = &projectPack{Weighted: semaphore.NewWeighted(projectPacks)}
		p.own[project] = own
	}
	own.users++
	p.mu.Unlock()
	leave := func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		if own.users--; own.users == 0 {
			delete(p.own, project)
		}
	}
	if err := own.Acquire(ctx, 1); err != nil {
		leave()
		return nil, err
	}
	if err := p.all.Acquire(ctx, 1); err != nil {
		own.Release(1)
		leave()
		return nil, err
	}
	return func() {
		p.all.Release(1)
		own.Release(1)
		leave()
	}, nil
}

// packing is a context that deleting the sandbox ends. The turn is held.
func (b *box) packing(ctx context.Context) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	b.mu.Lock()
	defer b.mu.Unlock()
	b.unpack = cancel
	return ctx, func() {
		cancel(nil)
		b.mu.Lock()
		defer b.mu.Unlock()
		b.unpack = nil
	}
}

// endPacking ends a commit at work, because the sandbox is deleted.
func (b *box) endPacking() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.unpack != nil {
		b.unpack(errStopped)
	}
}

package node

import (
	"context"
	"sync"

	"golang.org/x/sync/semaphore"
)

// places bound a kind of work: so much of it at one time, and so much of one project.
type places struct {
	all  *semaphore.Weighted
	each int64 // of a project

	mu  sync.Mutex
	own map[string]*projectPlaces
}

type projectPlaces struct {
	*semaphore.Weighted
	users int // who holds or waits
}

func newPlaces(all, each int64) *places {
	return &places{all: semaphore.NewWeighted(all), each: each, own: map[string]*projectPlaces{}}
}

// take waits for a place.
func (p *places) take(ctx context.Context, project string) (done func(), err error) {
	p.mu.Lock()
	own := p.own[project]
	if own == nil {
		own = &projectPlaces{Weighted: semaphore.NewWeighted(p.each)}
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

package rootfs

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/linux"
	"github.com/opendsec/dsec/layer"
)

// EvictLayer unmounts one layer that nobody uses, at once; IllegalState if
// somebody does. One that is not mounted is no error.
func (m *Mounts) EvictLayer(ctx context.Context, d layer.Digest) error {
	const op = "unmount layer"
	var errs []error
	var out []*mounted
	m.mu.Lock()
	others := m.leavingLocked(func(e *mounted) bool { return e.digest == d })
	for _, e := range m.all() {
		switch {
		case e.digest != d:
		case m.takeOutLocked(e, 0):
			out = append(out, e)
		default:
			errs = append(errs, dsec.Errorf(dsec.IllegalState, op, string(d), "%d use it", e.users))
		}
	}
	m.mu.Unlock()
	errs = append(errs, m.dissolve(ctx, out))
	for _, gone := range others {
		select {
		case <-gone:
		case <-ctx.Done():
			return errors.Join(append(errs, dsec.E(dsec.ClassOf(ctx.Err()), op, string(d), ctx.Err()))...)
		}
	}
	return errors.Join(errs...)
}

// Evict unmounts every layer that nobody has used for the given time.
func (m *Mounts) Evict(ctx context.Context, unused time.Duration) error {
	var out []*mounted
	m.mu.Lock()
	for _, e := range m.all() {
		if m.takeOutLocked(e, unused) {
			out = append(out, e)
		}
	}
	m.mu.Unlock()
	return m.dissolve(ctx, out)
}

// takeOutLocked takes a mount that nobody uses out of what there is, so that a Use
// of the same layer finds it either whole or not at all. It is to be dissolved
// then, without the lock: the last reference to a mount may go only when a read
// ahead of it has been answered, for which the others must not wait.
func (m *Mounts) takeOutLocked(e *mounted, unused time.Duration) bool {
	if !e.isReady() || e.users > 0 || time.Since(e.idle) < unused && !e.retired || e.file == nil {
		return false
	}
	delete(m.old, e)
	if m.mounts[e.digest] == e {
		delete(m.mounts, e.digest)
	}
	m.leaving[e] = make(chan struct{})
	return true
}

// dissolve unmounts what was taken out, each for itself.
func (m *Mounts) dissolve(ctx context.Context, out []*mounted) error {
	errs := make([]error, len(out))
	var all sync.WaitGroup
	for i, e := range out {
		all.Go(func() {
			e.close()
			if err := errors.Join(m.plan.Retire(e.name), m.keeper.Drop(ctx, e.name), m.keeper.Drop(ctx, retiredPrefix+e.name)); err != nil {
				errs[i] = fmt.Errorf("unmount layer %s: %w", e.digest, err)
			}
			m.mu.Lock()
			defer m.mu.Unlock()
			close(m.leaving[e])
			delete(m.leaving, e)
		})
	}
	all.Wait()
	return errors.Join(errs...)
}

func (m *Mounts) leavingLocked(which func(*mounted) bool) (gone []chan struct{}) {
	for e, c := range m.leaving {
		if which(e) {
			gone = append(gone, c)
		}
	}
	return gone
}

// awaitName waits until nothing is called so any more that is being dissolved: a
// layer that is whole has one name only.
func (m *Mounts) awaitName(name string) {
	m.mu.Lock()
	others := m.leavingLocked(func(e *mounted) bool { return e.name == name })
	m.mu.Unlock()
	for _, gone := range others {
		<-gone
	}
}

// Mounted returns a new descriptor of the root of the mount that new users of a
// layer get, or nil if it is not mounted.
func (m *Mounts) Mounted(d layer.Digest) (*os.File, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	e := m.mounts[d]
	if e == nil || !e.isReady() || e.file == nil {
		return nil, nil
	}
	f, err := linux.Duplicate(e.file)
	if err != nil {
		return nil, dsec.E(dsec.Internal, "open mount of layer", string(d), err)
	}
	return f, nil
}

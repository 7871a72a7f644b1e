package rootfs

import (
	"context"
	"errors"
	"os"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/linux"
	"github.com/opendsec/dsec/layer"
)

// EvictLayer unmounts one layer that nobody uses, at once; IllegalState if
// somebody does. One that is not mounted is no error.
func (m *Mounts) EvictLayer(ctx context.Context, d layer.Digest) error {
	const op = "unmount layer"
	m.mu.Lock()
	defer m.mu.Unlock()
	var errs []error
	for _, e := range m.all() {
		if e.digest != d {
			continue
		}
		gone, err := m.evictLocked(ctx, e, 0)
		if !gone {
			err = dsec.Errorf(dsec.IllegalState, op, string(d), "%d use it", e.users)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
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

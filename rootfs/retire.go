package rootfs

import (
	"context"
	"slices"
	"strings"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/layer"
)

// retiredPrefix is before the name of a mount under which the Keeper has it once
// more when it is retired, so that the next process knows.
const retiredPrefix = "retired/"

// Retire is for a mount through which something may have been read that is not
// so: who uses the layer from now on gets another one, with a device and page
// cache of its own. Who has it keeps it, and it goes when the last of them has
// gone. A layer whose data do not come on demand is left as it is: its errors are
// those of its files.
func (m *Mounts) Retire(ctx context.Context, d layer.Digest) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	e := m.mounts[d]
	if e == nil || !e.isReady() || e.file == nil || !e.demand {
		return nil
	}
	return m.retireLocked(ctx, e)
}

// Lost retires the mount whose data came by a session that has ended, and says
// whether there was one. A mount that was dissolved, whose session ends by that,
// is none.
func (m *Mounts) Lost(ctx context.Context, d layer.Digest, session string) (lost bool, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	all := m.all()
	i := slices.IndexFunc(all, func(e *mounted) bool {
		return e.digest == d && e.isReady() && e.file != nil && e.by != "" && e.by == session
	})
	if i < 0 {
		return false, nil
	}
	return true, m.retireLocked(ctx, all[i])
}

// retireLocked has it retired here even if the next process will not know.
func (m *Mounts) retireLocked(ctx context.Context, e *mounted) error {
	if e.retired {
		return nil
	}
	e.retired = true
	m.old[e] = struct{}{}
	if m.mounts[e.digest] == e {
		delete(m.mounts, e.digest)
	}
	if err := m.keeper.Put(ctx, retiredPrefix+e.name, e.file); err != nil {
		return dsec.E(dsec.ClassOf(err), "retire mount of layer", string(e.digest), err)
	}
	return nil
}

// adoptRetired tells which mounts an earlier process has retired, and forgets
// those that are gone.
func (m *Mounts) adoptRetired(ctx context.Context, mounts []string) (map[string]bool, error) {
	names, err := m.keeper.Names(ctx, retiredPrefix)
	if err != nil {
		return nil, err
	}
	retired := map[string]bool{}
	for _, n := range names {
		name := strings.TrimPrefix(n, retiredPrefix)
		if retired[name] = slices.Contains(mounts, name); retired[name] {
			continue
		}
		if err := m.keeper.Drop(ctx, n); err != nil {
			return nil, err
		}
	}
	return retired, nil
}

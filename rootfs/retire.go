package rootfs

import (
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/linux"
	"github.com/opendsec/dsec/layer"
)

// retiredPrefix is before the name of a mount under which the Keeper has it once
// more when it is retired, so that the next process knows.
const retiredPrefix = "retired/"

// Retire is for a mount through which something may have been read that is not
// so: the one whose data come by that session, or that new users get ("" says
// any). Who uses the layer from now on gets another one. By FUSE that has a device
// and a page cache of its own. By events all mounts of a layer read one file: what
// the page cache has of that is dropped before the next is made, but for what the
// kernel does not let go of. Who has it keeps it, and it goes when the last of
// them has gone.
//
// Of a layer there is at most one mount that was retired for this: when the one
// after it fails as well, a third would do no better. A layer whose data do not
// come on demand is left as it is: its errors are those of its files.
//
// It waits for nothing. The next process knows when Note has returned.
func (m *Mounts) Retire(d layer.Digest, session string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	e := m.mounts[d]
	if e == nil || !e.isReady() || e.file == nil || !e.demand || session != "" && e.by != session || m.hasRetiredLocked(d) {
		return
	}
	m.retireLocked(e)
}

// Lost retires the mount whose data came by a session that has ended, as Retire
// does, and says whether there is one. A mount that was dissolved, whose session
// ends by that, is none.
func (m *Mounts) Lost(d layer.Digest, session string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	all := m.all()
	i := slices.IndexFunc(all, func(e *mounted) bool {
		return e.digest == d && e.isReady() && e.file != nil && e.by != "" && e.by == session
	})
	if i < 0 {
		return false
	}
	all[i].lost = true
	m.retireLocked(all[i])
	return true
}

func (m *Mounts) retireLocked(e *mounted) {
	e.retired = true
	m.old[e] = struct{}{}
	if m.mounts[e.digest] == e {
		delete(m.mounts, e.digest)
	}
}

// Note has the next process know, too, which mounts of a layer are retired.
func (m *Mounts) Note(ctx context.Context, d layer.Digest) error {
	m.mu.Lock()
	var open []*mounted
	for e := range m.old {
		if e.digest == d && e.retired && !e.noted {
			e.users++ // so that it is not dissolved meanwhile
			open = append(open, e)
		}
	}
	m.mu.Unlock()
	var errs []error
	for _, e := range open {
		err := m.keeper.Put(ctx, retiredPrefix+e.name, e.file)
		if err != nil {
			err = dsec.E(dsec.ClassOf(err), "retire mount of layer", string(d), err)
		}
		errs = append(errs, err)
		m.mu.Lock()
		e.noted = e.noted || err == nil
		if e.users--; e.users == 0 {
			e.idle = time.Now()
		}
		m.mu.Unlock()
	}
	return errors.Join(errs...)
}

func (m *Mounts) hasRetired(d layer.Digest) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.hasRetiredLocked(d)
}

func (m *Mounts) hasRetiredLocked(d layer.Digest) bool {
	for e := range m.old {
		if e.digest == d && e.retired && !e.lost {
			return true
		}
	}
	return false
}

func dropCache(path string) error {
	f, err := openQuietly(path)
	if err == nil {
		defer f.Close()
		err = linux.DropCache(f)
	}
	if err != nil {
		return dsec.E(dsec.Internal, "drop cache of", path, err)
	}
	return nil
}

// adoptLost has a mount count as lost whose session is not there any more: the
// process before this one could not note it.
func (m *Mounts) adoptLost(ctx context.Context, e *mounted) error {
	if e.retired || e.by == "" || m.opts.Lives == nil {
		return nil
	}
	lives, err := m.opts.Lives(ctx, e.digest, e.by)
	if err != nil || lives {
		return err
	}
	m.opts.Log.Warn("a mount of a layer has no session any more", "mount", e.name)
	e.retired, e.lost = true, true
	m.lost = append(m.lost, e.digest)
	return nil
}

// LostBefore lists the layers of which Open found a mount that nobody has called
// lost and whose session is gone. It is retired; Note is to be called when it is
// written down who had it.
func (m *Mounts) LostBefore() []layer.Digest { return m.lost }

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

package rootfs

import (
	"os"
	"slices"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/layer"
)

// Layer returns a detached mount of one layer that a user uses, with ids as they are in it. It stays good when
// the user does not use it any more.
func (m *Mounts) Layer(user string, d layer.Digest) (*os.File, error) {
	m.mu.Lock()
	used := m.users[user]
	i := slices.IndexFunc(used, func(e *mounted) bool { return e.digest == d })
	if i < 0 || used[i].file == nil {
		m.mu.Unlock()
		return nil, dsec.Errorf(dsec.Internal, "mount layer", string(d), "not in use")
	}
	f := used[i].file
	m.mu.Unlock()
	c, err := m.plan.Clone(f, nil)
	if err != nil {
		return nil, dsec.E(dsec.Internal, "mount layer", string(d), err)
	}
	return c, nil
}

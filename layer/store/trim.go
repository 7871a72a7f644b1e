package store

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/layer"
)

// Trim evicts layers until the data that are on this machine take at most so many
// bytes of its disk, or nothing is left that may go: those not used for the
// longest time first, and none that is leased. It returns what became free and
// what they still take, also when some could not go; 0 with an error: that is not known.
func (s *Store) Trim(ctx context.Context, most int64, letGo LetGo) (freed, used int64, err error) {
	all, total, err := s.taken()
	if err != nil {
		return 0, 0, err
	}
	var errs []error
	for _, e := range all {
		if total-freed <= most || ctx.Err() != nil {
			break
		}
		n, err := s.Evict(ctx, dsec.LayerRef(e.Digest), letGo)
		freed += n
		if class := dsec.ClassOf(err); err != nil && class != dsec.IllegalState && class != dsec.NotFound { // leased or gone meanwhile
			errs = append(errs, err)
		}
	}
	return freed, total - freed, errors.Join(errs...)
}

// taken lists the layers that nobody leases, the one used last at the end, and
// says what all layers' data take.
func (s *Store) taken() (idle []Entry, total int64, err error) {
	view := s.View("")
	s.mu.Lock()
	all, err := view.listLocked()
	s.mu.Unlock()
	if err != nil {
		return nil, 0, err
	}
	for _, e := range all {
		n, err := s.onDisk(e.Digest)
		if err != nil {
			return nil, 0, err
		}
		total += n
		if len(e.Leases) == 0 && n > 0 {
			idle = append(idle, e)
		}
	}
	slices.SortStableFunc(idle, func(a, b Entry) int { return cmp.Compare(a.LastUse.UnixNano(), b.LastUse.UnixNano()) })
	return idle, total, nil
}

// onDisk is what the data of a layer take of the disk, holes not counted; 0 of
// one that is not here.
func (s *Store) onDisk(d layer.Digest) (int64, error) {
	var st unix.Stat_t
	err := unix.Stat(s.path("layers", d.Hex(), layer.DataFile), &st)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, diskError("look at layer", string(d), err)
	}
	return st.Blocks * 512, nil
}

package store

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path"
	"regexp"
	"slices"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/layer"
)

// lease keeps layers. It remembers what its refs meant when it was taken. It
// outlives this program, but is not synced to the disk: taking one is on the way
// of every sandbox, and after a power failure there are no sandboxes. Who kept
// the disk of a stopped one leases its layers again at start; until then the
// grace time keeps them.
type lease struct {
	Refs    []dsec.LayerRef `json:"refs"`
	Digests []layer.Digest  `json:"digests"` // the layers
	// Meant is what each ref meant, a layer or a stack. A lease from before there
	// were stacks has none: its digests are that.
	Meant []layer.Digest `json:"meant,omitempty"`
}

// means lists what each ref meant.
func (l lease) means() []layer.Digest {
	if l.Meant != nil {
		return l.Meant
	}
	return l.Digests
}

var leasePattern = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._:@+-]{0,127}$`)

// maxRaces bounds how often a layer may be collected between being made whole
// and being leased.
const maxRaces = 5

// Acquire implements layer.Store.
func (s *Store) Acquire(ctx context.Context, name string, refs []dsec.LayerRef) (layer.Set, error) {
	const op = "lease layers"
	if !leasePattern.MatchString(name) {
		return layer.Set{}, dsec.Errorf(dsec.Invalid, op, dsec.Quote(name), "want letters, digits and ._:@+-, at most 128")
	}
	races := map[layer.Digest]int{}
	for first := true; ; first = false {
		set, missing, err := s.tryAcquire(name, refs, first)
		if unknown, ok := errors.AsType[*unknownRef](err); ok {
			if !first {
				return layer.Set{}, unknown.err
			}
			if err := s.makeKnown(ctx, refs); err != nil {
				return layer.Set{}, err
			}
			continue
		}
		if err != nil || missing == "" {
			return set, err
		}
		if waited, err := s.awaitEviction(ctx, missing); err != nil {
			return layer.Set{}, err
		} else if waited {
			continue
		}
		if races[missing]++; races[missing] > maxRaces {
			return layer.Set{}, dsec.Errorf(dsec.Unavailable, op, string(missing), "removed as fast as it is fetched")
		}
		if err := s.fetchAny(ctx, missing); err != nil {
			return layer.Set{}, err
		}
	}
}

// tryAcquire leases what is here, or names the first layer that is not. At first
// a reference may be too old to be believed.
func (s *Store) tryAcquire(name string, refs []dsec.LayerRef, first bool) (set layer.Set, missing layer.Digest, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	held, ok := s.leases[name]
	if ok && !slices.Equal(held.Refs, refs) {
		return set, "", dsec.Errorf(dsec.Conflict, "lease layers", name, "holds other layers")
	}
	if !ok {
		held = lease{Refs: slices.Clone(refs)}
		for _, ref := range refs {
			d, err := s.resolveLocked(ref)
			if err == nil && first && s.staleLocked(ref) {
				err = dsec.Errorf(dsec.NotFound, "resolve layer", dsec.Quote(string(ref)), "was resolved too long ago")
			}
			if dsec.ClassOf(err) == dsec.NotFound && s.opts.References != nil && hasRegistry(string(ref)) {
				err = &unknownRef{err}
			}
			if err != nil {
				return set, "", err
			}
			held.Meant = append(held.Meant, d)
		}
	}
	set.Lease = name
	if missing, err = s.stackLocked(&set, held); err != nil || missing != "" {
		return layer.Set{}, missing, err
	}
	if ok {
		return set, "", nil
	}
	for _, l := range set.Layers {
		held.Digests = append(held.Digests, l.Digest)
	}
	b, err := json.Marshal(held)
	if err == nil {
		err = s.writeFile(path.Join("leases", name), b, false)
	}
	if err != nil {
		return layer.Set{}, "", diskError("lease layers", name, err)
	}
	s.leases[name] = held
	return set, "", nil
}

// Release implements layer.Store.
func (s *Store) Release(_ context.Context, name string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	held, ok := s.leases[name]
	if !ok {
		return nil
	}
	for _, d := range slices.Concat(held.Digests, held.Meant) {
		if err := s.touch(d); err != nil {
			return diskError("release layers", name, err)
		}
	}
	if err := os.Remove(s.path("leases", name)); err != nil && !os.IsNotExist(err) {
		return diskError("release layers", name, err)
	}
	delete(s.leases, name)
	return nil
}

// Leases implements layer.Store.
func (s *Store) Leases(context.Context) ([]string, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	names := make([]string, 0, len(s.leases))
	for name := range s.leases {
		names = append(names, name)
	}
	slices.Sort(names)
	return names, nil
}

func (s *Store) loadLeases() error {
	files, err := os.ReadDir(s.path("leases"))
	if err != nil {
		return err
	}
	for _, f := range files {
		b, err := os.ReadFile(s.path("leases", f.Name()))
		if err != nil {
			return err
		}
		var l lease
		if err := json.Unmarshal(b, &l); err != nil || len(l.Refs) != len(l.means()) {
			s.opts.Log.Warn("lease lost in a power failure", "lease", f.Name())
			if err := os.Remove(s.path("leases", f.Name())); err != nil {
				return err
			}
			continue
		}
		s.leases[f.Name()] = l
	}
	return nil
}

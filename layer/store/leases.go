package store

import (
	"context"
	"encoding/json"
	"os"
	"path"
	"slices"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/image"
	"github.com/opendsec/dsec/layer"
)

// lease keeps layers. It remembers what its refs meant when it was taken.
type lease struct {
	Refs    []dsec.LayerRef `json:"refs"`
	Digests []layer.Digest  `json:"digests"`
}

// Acquire implements layer.Store.
func (s *Store) Acquire(_ context.Context, name string, refs []dsec.LayerRef) (layer.Set, error) {
	const op = "lease layers"
	if !leasePattern.MatchString(name) {
		return layer.Set{}, dsec.Errorf(dsec.Invalid, op, dsec.Quote(name), "want letters, digits and ._:@+-, at most 128")
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	held, ok := s.leases[name]
	if ok && !slices.Equal(held.Refs, refs) {
		return layer.Set{}, dsec.Errorf(dsec.Conflict, op, name, "holds other layers")
	}
	if !ok {
		held = lease{Refs: slices.Clone(refs)}
		for _, ref := range refs {
			d, err := s.resolveLocked(ref)
			if err != nil {
				return layer.Set{}, err
			}
			held.Digests = append(held.Digests, d)
		}
	}
	set := layer.Set{Lease: name}
	for i, d := range held.Digests {
		l, err := s.local(d)
		if err != nil {
			return layer.Set{}, dsec.E(dsec.ClassOf(err), op, dsec.Quote(string(refs[i])), err)
		}
		set.Layers = append(set.Layers, l)
		set.Config = overlayConfig(set.Config, l.Config)
	}
	if ok {
		return set, nil
	}
	b, err := json.Marshal(held)
	if err == nil {
		err = s.writeFile(path.Join("leases", name), b)
	}
	if err != nil {
		return layer.Set{}, diskError(op, name, err)
	}
	s.leases[name] = held
	return set, nil
}

// Release implements layer.Store.
func (s *Store) Release(_ context.Context, name string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.leases[name]; !ok {
		return nil
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
		if err := json.Unmarshal(b, &l); err != nil || len(l.Refs) != len(l.Digests) {
			return dsec.Errorf(dsec.Corrupt, "read lease", f.Name(), "not a lease: %w", err)
		}
		s.leases[f.Name()] = l
	}
	return nil
}

// overlayConfig puts what an upper layer says over what those below said:
// variables by name, the rest if it is there.
func overlayConfig(base image.Config, up *image.Config) image.Config {
	if up == nil {
		return base
	}
	out := base
	out.Env = mergeEnv(base.Env, up.Env)
	if up.User != "" {
		out.User = up.User
	}
	if up.Workdir != "" {
		out.Workdir = up.Workdir
	}
	if up.Entrypoint != nil || up.Cmd != nil {
		out.Entrypoint, out.Cmd = up.Entrypoint, up.Cmd
	}
	if up.Arch != "" {
		out.Arch = up.Arch
	}
	if up.StopSignal != "" {
		out.StopSignal = up.StopSignal
	}
	return out
}

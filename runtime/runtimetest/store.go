package runtimetest

import (
	"context"
	"sync"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/layer"
)

// Missing is the one layer that a Store does not have.
const Missing dsec.LayerRef = "missing"

// Store is a layer.Store for a Fake, which ignores what layers contain: it has
// every layer but Missing.
type Store struct {
	mu     sync.Mutex
	leases map[string]bool
}

var _ layer.Store = (*Store)(nil)

// NewStore makes an empty one.
func NewStore() *Store { return &Store{leases: map[string]bool{}} }

// For implements layer.Store: there are no projects here.
func (s *Store) For(string) layer.Store { return s }

// Acquire gives a layer for each ref.
func (s *Store) Acquire(_ context.Context, lease string, refs []dsec.LayerRef) (layer.Set, error) {
	set := layer.Set{Lease: lease}
	for _, r := range refs {
		if r == Missing {
			return layer.Set{}, dsec.Errorf(dsec.NotFound, "acquire layer", string(r), "no such tag")
		}
		set.Layers = append(set.Layers, layer.Local{Info: layer.Info{Digest: layer.DigestOf([]byte(r))}})
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.leases[lease] = true
	return set, nil
}

// OpenData implements layer.Store: the layers have none.
func (s *Store) OpenData(_ context.Context, l layer.Local) (layer.Data, error) {
	return nil, dsec.Errorf(dsec.NotFound, "open data of layer", string(l.Digest), "it has none")
}

// Release ends a lease.
func (s *Store) Release(_ context.Context, lease string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.leases, lease)
	return nil
}

// Leases lists those held.
func (s *Store) Leases(context.Context) (out []string, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for l := range s.leases {
		out = append(out, l)
	}
	return out, nil
}

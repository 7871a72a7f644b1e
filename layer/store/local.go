package store

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/layer"
)

// manifest reads and verifies the manifest of a layer that is here.
func (s *Store) manifest(d layer.Digest) (layer.Manifest, error) {
	const op = "read layer"
	if _, err := layer.ParseDigest(string(d)); err != nil {
		return layer.Manifest{}, err
	}
	b, err := os.ReadFile(s.path("layers", d.Hex(), "manifest"))
	if errors.Is(err, fs.ErrNotExist) {
		return layer.Manifest{}, dsec.Errorf(dsec.NotFound, op, string(d), "not in this store")
	}
	if err != nil {
		return layer.Manifest{}, diskError(op, string(d), err)
	}
	return layer.DecodeManifest(b, d)
}

// localLocked describes a layer that is here.
func (s *Store) localLocked(d layer.Digest) (layer.Local, error) {
	if l, ok := s.known[d]; ok {
		return l, nil
	}
	m, err := s.manifest(d)
	if err != nil {
		return layer.Local{}, err
	}
	var a about
	if b, err := os.ReadFile(s.path("layers", d.Hex(), "info")); err == nil && json.Unmarshal(b, &a) != nil {
		a = about{} // of a layer it says nothing that matters
	}
	l := layer.Local{
		Info: layer.Info{Digest: d, MetaSize: m.Meta.Size, DataSize: m.Data.Size, Entries: m.Entries, Config: m.Config},
		Meta: s.path("layers", d.Hex(), "meta"),
	}
	if m.Data.Size > 0 {
		l.Data = s.path("layers", d.Hex(), "data")
	}
	l.Source, l.Image, l.Lineage = a.Source, a.image(m.Config), a.Lineage
	s.known[d] = l
	return l, nil
}

// Entry is a layer with what keeps it.
type Entry struct {
	layer.Info
	Tags    []string  `json:"tags,omitempty"`
	Leases  []string  `json:"leases,omitempty"`
	Stacks  []string  `json:"stacks,omitempty"` // digests of those it is in
	Above   string    `json:"above,omitempty"`  // a packed layer that is kept and stands on it
	LastUse time.Time `json:"last_use"`
}

// List describes every layer that is here, in the order of digests; to a
// project those it has a name for.
func (s *Store) List(context.Context) ([]Entry, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	all, err := s.listLocked()
	if s.project == "" {
		return all, err
	}
	return slices.DeleteFunc(all, func(e Entry) bool { return len(e.Tags) == 0 }), err
}

func (s *Store) listLocked() ([]Entry, error) {
	dirs, err := os.ReadDir(s.path("layers"))
	if err != nil {
		return nil, diskError("list layers", s.dir, err)
	}
	tags, err := s.tagsLocked()
	if err != nil {
		return nil, err
	}
	below, err := s.standingLocked(tags)
	if err != nil {
		return nil, err
	}
	out := make([]Entry, 0, len(dirs)+len(s.stacks))
	for d := range s.stacks {
		e, err := s.entryLocked(d, tags, below)
		if err != nil {
			return nil, err
		}
		out = append(out, e)
	}
	for _, dir := range dirs {
		e, err := s.entryLocked(layer.Digest("sha256:"+dir.Name()), tags, below)
		if err != nil {
			return nil, err
		}
		out = append(out, e)
	}
	slices.SortFunc(out, func(a, b Entry) int { return strings.Compare(string(a.Digest), string(b.Digest)) })
	return out, nil
}

func (s *Store) entryLocked(d layer.Digest, tags map[string]tagged, below map[layer.Digest]layer.Digest) (Entry, error) {
	kind := "stacks"
	info, ok := s.stacks[d]
	if !ok {
		kind = "layers"
		l, err := s.localLocked(d)
		if err != nil {
			return Entry{}, err
		}
		info = l.Info
	}
	st, err := os.Stat(s.path(kind, d.Hex()))
	if err != nil {
		return Entry{}, diskError("read layer", string(d), err)
	}
	e := Entry{Info: info, LastUse: st.ModTime(), Above: string(below[d])}
	e.Stacks = slices.Sorted(slices.Values(s.inside[d]))
	for _, p := range info.Layers {
		if l, err := s.localLocked(p.Digest); err == nil { // else it is elsewhere
			e.MetaSize, e.DataSize, e.Entries = e.MetaSize+l.MetaSize, e.DataSize+l.DataSize, e.Entries+l.Entries
		}
	}
	for tag, t := range tags {
		if t.digest == d && s.sees(t.project) {
			e.Tags = append(e.Tags, tag)
		}
	}
	for _, r := range s.refs {
		if r.Stack == d {
			e.Tags = append(e.Tags, r.Ref)
		}
	}
	for name, held := range s.leases {
		if slices.Contains(held.Digests, d) || slices.Contains(held.Meant, d) {
			e.Leases = append(e.Leases, name)
		}
	}
	slices.Sort(e.Tags)
	slices.Sort(e.Leases)
	return e, nil
}

// Inspect describes one layer that is here.
func (s *Store) Inspect(_ context.Context, ref dsec.LayerRef) (Entry, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	d, err := s.resolveLocked(ref)
	if err != nil {
		return Entry{}, err
	}
	tags, err := s.tagsLocked()
	if err != nil {
		return Entry{}, err
	}
	below, err := s.standingLocked(tags)
	if err != nil {
		return Entry{}, err
	}
	return s.entryLocked(d, tags, below)
}

// Verify reads what is here of a layer and compares every byte with its digest.
func (s *Store) Verify(ctx context.Context, ref dsec.LayerRef) error {
	s.mu.Lock()
	d, err := s.resolveLocked(ref)
	stack, isStack := s.stacks[d]
	s.mu.Unlock()
	if err == nil && isStack {
		for _, p := range stack.Layers {
			if err := s.Verify(ctx, dsec.LayerRef(p.Digest)); err != nil {
				return err
			}
		}
		return nil
	}
	if err == nil {
		_, _, err = s.verify(ctx, d)
	}
	return err
}

// keepers says in words what keeps a layer.
func (e Entry) keepers() string {
	var why []string
	if len(e.Leases) > 0 {
		why = append(why, "leased by "+strings.Join(e.Leases, ", "))
	}
	if len(e.Tags) > 0 {
		why = append(why, "tagged "+strings.Join(e.Tags, ", "))
	}
	if len(e.Stacks) > 0 {
		why = append(why, "in "+strings.Join(e.Stacks, ", "))
	}
	if e.Above != "" {
		why = append(why, "below "+e.Above)
	}
	return strings.Join(why, "; ")
}

package store

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"strings"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob"
	"github.com/opendsec/dsec/image"
	"github.com/opendsec/dsec/layer"
)

// Add makes a layer of two files that fill writes, and points the tag to it.
// What fill wrote is believed no more than what a converter did. The lineage it
// returns is kept with the layer.
func (s *Store) Add(ctx context.Context, n layer.New, fill func(image.Files) (dsec.Lineage, error)) (layer.Info, error) {
	const op = "add layer"
	v := s.View(n.Tag.Project)
	if err := v.checkTag(n.Tag.Name); err != nil {
		return layer.Info{}, err
	}
	dir, err := os.MkdirTemp(s.path("tmp"), "layer-*")
	if err != nil {
		return layer.Info{}, diskError(op, n.Source, err)
	}
	defer os.RemoveAll(dir) // what stays is swept at the next Open
	var files image.Files
	if err := create(dir, &files); err != nil {
		return layer.Info{}, diskError(op, n.Source, err)
	}
	defer closeAll(files)
	lineage, err := fill(files)
	if err != nil {
		return layer.Info{}, diskError(op, n.Source, err)
	}
	if err := ctx.Err(); err != nil {
		return layer.Info{}, diskError(op, n.Source, err)
	}
	info, err := s.seal(dir, files, n.Config, about{Source: n.Source, Image: new(bool), Lineage: &lineage})
	if err == nil {
		err = s.push(ctx, info.Digest)
	}
	if err != nil {
		return layer.Info{}, diskError(op, n.Source, err)
	}
	if n.Tag.Name == "" {
		return info, nil
	}
	return info, v.tagUntil(n.Tag.Name, info.Digest, n.Tag.Expires)
}

// lineageKey is of an object that is no part of the layer: it may be missing,
// and of layers with the same bytes it is that of the first.
func lineageKey(d layer.Digest) string { return "lineages/" + d.Hex() }

func (s *Store) pushLineage(ctx context.Context, d layer.Digest) error {
	s.mu.Lock()
	l, err := s.localLocked(d)
	s.mu.Unlock()
	if err != nil || l.Lineage == nil {
		return err
	}
	b, err := json.Marshal(l.Lineage)
	if err != nil {
		return err
	}
	return s.put(ctx, lineageKey(d), bytes.NewReader(b))
}

// fetchLineage returns nil for a layer that was not packed. One that cannot be
// read is as good as none: it says nothing of what the layer holds.
func (s *Store) fetchLineage(ctx context.Context, d layer.Digest) (*dsec.Lineage, error) {
	b, err := blob.ReadAll(ctx, s.opts.Blobs, lineageKey(d), layer.MaxLineage)
	if errors.Is(err, dsec.NotFound.Err()) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	l, err := layer.DecodeLineage(b)
	if err != nil {
		s.opts.Log.Warn("lineage not readable", "layer", d, "err", err)
		return nil, nil
	}
	return l, nil
}

// Stack implements layer.Store.
func (s *Store) Stack(ctx context.Context, ref dsec.LayerRef) ([]dsec.LayerRef, error) {
	l, err := s.peek(ref)
	if dsec.ClassOf(err) == dsec.NotFound && s.opts.Blobs != nil && strings.HasPrefix(string(ref), "sha256:") {
		if err = s.fetchOnce(ctx, layer.Digest(ref)); err == nil {
			l, err = s.peek(ref)
		}
	}
	if dsec.ClassOf(err) == dsec.NotFound {
		return []dsec.LayerRef{ref}, nil // whoever asks for it is told
	}
	if err != nil {
		return nil, err
	}
	var all []dsec.LayerRef
	if l.Lineage != nil {
		for _, p := range l.Lineage.Parents {
			all = append(all, dsec.LayerRef(p))
		}
	}
	return append(all, ref), nil
}

func (s *Store) peek(ref dsec.LayerRef) (layer.Local, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	d, err := s.resolveLocked(ref)
	if err != nil {
		return layer.Local{}, err
	}
	return s.localLocked(d)
}

// parentsLocked maps each layer that packed ones stand on to one of those that
// something keeps: a packed layer is of no use without what is below it.
func (s *Store) parentsLocked(tags map[string]tagged) (map[layer.Digest]layer.Digest, error) {
	kept := map[layer.Digest]bool{}
	for _, t := range tags {
		kept[t.digest] = true
	}
	for _, l := range s.leases {
		for _, d := range l.Digests {
			kept[d] = true
		}
	}
	below := map[layer.Digest]layer.Digest{}
	for d := range kept {
		l, err := s.localLocked(d)
		if dsec.ClassOf(err) == dsec.NotFound {
			continue
		}
		if err != nil {
			return nil, err
		}
		if l.Lineage == nil {
			continue
		}
		for _, p := range l.Lineage.Parents {
			below[layer.Digest(p)] = d
		}
	}
	return below, nil
}

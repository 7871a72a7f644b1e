package store

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob"
	"github.com/opendsec/dsec/image"
	"github.com/opendsec/dsec/layer"
)

// Add makes a layer of two files that fill writes, and points the tag to it.
// What fill wrote is believed no more than what a converter did. The lineage it
// returns is kept with the layer.
func (s *Store) Add(ctx context.Context, n layer.New, fill func(image.Files) (dsec.Lineage, error)) (layer.Info, error) {
	v := s.View(n.Tag.Project)
	if err := v.checkTag(n.Tag.Name); err != nil {
		return layer.Info{}, err
	}
	var lineage dsec.Lineage
	info, err := s.makeLayer(about{Source: n.Source, Image: new(bool), Lineage: &lineage}, func(files image.Files) (image.Result, error) {
		var err error
		if lineage, err = fill(files); err == nil {
			err = ctx.Err()
		}
		return image.Result{Config: n.Config}, err
	})
	if err == nil {
		err = s.push(ctx, info.Digest)
	}
	if err != nil {
		return layer.Info{}, diskError("add layer", n.Source, err)
	}
	if n.Tag.Name == "" {
		return info, nil
	}
	return info, v.tagUntil(n.Tag.Name, info.Digest, n.Tag.Expires)
}

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
	return s.put(ctx, layer.LineageKey(d), bytes.NewReader(b))
}

// fetchLineage returns nil for a layer that was not packed. One that cannot be
// read is as good as none: it says nothing of what the layer holds.
func (s *Store) fetchLineage(ctx context.Context, d layer.Digest) (*dsec.Lineage, error) {
	b, err := blob.ReadAll(ctx, s.opts.Blobs, layer.LineageKey(d), layer.MaxLineage)
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

// parentsLocked are what the lowest of some layers was packed on, if it was. It
// names the layer if that is not here.
func (s *Store) parentsLocked(digests []layer.Digest) (all []layer.Digest, missing layer.Digest, err error) {
	if len(digests) == 0 || s.stacks[digests[0]].IsStack() {
		return nil, "", nil
	}
	l, err := s.localLocked(digests[0])
	if dsec.ClassOf(err) == dsec.NotFound {
		return nil, digests[0], nil
	}
	if err != nil || l.Lineage == nil {
		return nil, "", err
	}
	for _, p := range l.Lineage.Parents {
		all = append(all, layer.Digest(p))
	}
	return all, "", nil
}

// standingLocked maps each layer that packed ones stand on to one of those that
// something keeps: a packed layer is of no use without what is below it.
func (s *Store) standingLocked(tags map[string]tagged) (map[layer.Digest]layer.Digest, error) {
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

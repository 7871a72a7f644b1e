package store

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/image"
	"github.com/opendsec/dsec/image/erofs"
	"github.com/opendsec/dsec/layer"
)

// Merged is what became of layers that images have at their bottom.
type Merged struct {
	Layers []layer.Digest `json:"layers"`          // the lowest first
	Layer  layer.Digest   `json:"layer,omitempty"` // "" if nothing was done
	Images []string       `json:"images"`          // what stood, and stands, on them: names, or digests
	Before int64          `json:"before"`          // bytes of the layers, stored apart
	After  int64          `json:"after,omitempty"` // bytes of the merged layer
}

// prefix is a group of stacks with the same layers at the bottom.
type prefix struct {
	layers []layer.Part
	stacks []layer.Info
}

// MergePrefixes makes one layer of the layers that stacks have in common at the
// bottom: all those that refs name, or, without refs, each group of at least
// two that has any in common. The names of the stacks then mean stacks with the
// merged layer; who runs keeps what he has. With dry it only says what it would
// do. Fewer than two layers are not merged.
func (s *Store) MergePrefixes(ctx context.Context, refs []dsec.LayerRef, dry bool) ([]Merged, error) {
	groups, err := s.prefixes(ctx, refs)
	if err != nil {
		return nil, err
	}
	var out []Merged
	for _, p := range groups {
		m, err := s.mergePrefix(ctx, p, dry)
		if err != nil {
			return out, err
		}
		out = append(out, m)
	}
	return out, nil
}

func (s *Store) prefixes(ctx context.Context, refs []dsec.LayerRef) ([]prefix, error) {
	var named []layer.Info
	for _, ref := range refs {
		info, err := s.Stack(ctx, ref)
		if err != nil {
			return nil, err
		}
		named = append(named, info)
	}
	if len(refs) > 0 {
		p := prefix{common(named), named}
		if len(p.layers) < 2 {
			return nil, dsec.Errorf(dsec.Invalid, "merge layers", string(refs[0]), "%d layers at the bottom of all, want at least 2", len(p.layers))
		}
		return []prefix{p}, nil
	}
	s.mu.Lock()
	byBottom := map[layer.Digest][]layer.Info{}
	for _, info := range s.stacks {
		byBottom[info.Layers[0].Digest] = append(byBottom[info.Layers[0].Digest], info)
	}
	s.mu.Unlock()
	var out []prefix
	for _, group := range byBottom {
		slices.SortFunc(group, func(a, b layer.Info) int { return strings.Compare(string(a.Digest), string(b.Digest)) })
		if p := (prefix{common(group), group}); len(group) > 1 && len(p.layers) > 1 {
			out = append(out, p)
		}
	}
	slices.SortFunc(out, func(a, b prefix) int { return strings.Compare(string(a.layers[0].Digest), string(b.layers[0].Digest)) })
	return out, nil
}

// common is the longest run of layers that all have at the bottom, and in one role.
func common(stacks []layer.Info) []layer.Part {
	out := stacks[0].Layers
	for _, st := range stacks {
		n := 0
		for n < len(out) && n < len(st.Layers) && out[n].Digest == st.Layers[n].Digest && st.Layers[n].Role == st.Layers[0].Role {
			n++
		}
		out = out[:n]
	}
	return out
}

func (s *Store) mergePrefix(ctx context.Context, p prefix, dry bool) (Merged, error) {
	var m Merged
	for _, l := range p.layers {
		e, err := s.View("").Inspect(ctx, dsec.LayerRef(l.Digest))
		if err != nil {
			return m, err
		}
		m.Layers = append(m.Layers, l.Digest)
		m.Before += e.MetaSize + e.DataSize
	}
	for _, st := range p.stacks {
		e, err := s.Inspect(ctx, dsec.LayerRef(st.Digest))
		if err != nil {
			return m, err
		}
		if m.Images = append(m.Images, e.Tags...); len(e.Tags) == 0 {
			m.Images = append(m.Images, string(st.Digest))
		}
	}
	if dry {
		return m, nil
	}
	info, err := s.mergeLayers(ctx, m.Layers)
	if err != nil {
		return m, err
	}
	m.Layer, m.After = info.Digest, info.MetaSize+info.DataSize
	for _, st := range p.stacks {
		if err := s.restack(ctx, st, len(p.layers), info.Digest); err != nil {
			return m, err
		}
	}
	return m, nil
}

// mergeLayers makes one layer of layers that stand on nothing, once.
func (s *Store) mergeLayers(ctx context.Context, digests []layer.Digest) (layer.Info, error) {
	const op = "merge layers"
	lease := "merge-" + mergedNote(digests)[:32]
	refs := make([]dsec.LayerRef, len(digests))
	for i, d := range digests {
		refs[i] = dsec.LayerRef(d)
	}
	if _, err := s.Acquire(ctx, lease, refs); err != nil {
		return layer.Info{}, err
	}
	defer s.Release(context.WithoutCancel(ctx), lease) // leases of nobody are dropped at the next start
	var images []*erofs.Image
	for _, d := range digests {
		im, closeIt, err := s.image(d)
		if err != nil {
			return layer.Info{}, diskError(op, string(d), err)
		}
		defer closeIt()
		images = append(images, im)
	}
	info, err := s.makeLayer(partOf(fmt.Sprintf("%d layers merged", len(digests))), func(files image.Files) (image.Result, error) {
		return image.Merge(ctx, images, files, image.MergeOptions{})
	})
	if err == nil {
		err = s.push(ctx, info.Digest)
	}
	if err == nil {
		err = s.note(mergedNote(digests), converted{Layer: info.Digest})
	}
	if err != nil {
		return layer.Info{}, diskError(op, string(digests[0]), err)
	}
	return info, nil
}

// mergedNote is the key of what layers at a bottom were merged into.
func mergedNote(digests []layer.Digest) string {
	var b strings.Builder
	b.WriteString("dsec merged 1\n")
	for _, d := range digests {
		b.WriteString(string(d) + "\n")
	}
	return noteKey(b.String())
}

// restack lets the names of a stack mean one with n layers merged.
func (s *Store) restack(ctx context.Context, old layer.Info, n int, merged layer.Digest) error {
	first := old.Layers[0]
	first.Digest = merged
	st := layer.Stack{Layers: append([]layer.Part{first}, old.Layers[n:]...), Config: old.Config}
	info, err := s.PutStack(ctx, st, old.Source, "")
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	tags, err := s.tagsLocked()
	if err != nil {
		return err
	}
	for tag, t := range tags {
		if t.digest != old.Digest {
			continue
		}
		file, err := tagFile(tag)
		if err == nil {
			err = s.writeFile(file, tagged{info.Digest, t.project, t.expires}.encode(), true)
		}
		if err != nil {
			return diskError("merge layers", tag, err)
		}
	}
	for _, r := range s.refs {
		if r.Stack == old.Digest {
			if err := s.setRefLocked(r.Ref, r.Platform, info.Digest, r.At); err != nil {
				return diskError("merge layers", r.Ref, err)
			}
		}
	}
	return nil
}

// premerged replaces layers at the bottom of a new stack that were merged before.
func (s *Store) premerged(ctx context.Context, parts []layer.Part) []layer.Part {
	digests := make([]layer.Digest, len(parts))
	for i, p := range parts {
		digests[i] = p.Digest
	}
	for n := len(parts); n > 1; n-- {
		c, ok := s.notedHere(mergedNote(digests[:n]))
		if ok && c.Layer != "" && s.whole(ctx, c.Layer) == nil {
			return append([]layer.Part{{Digest: c.Layer}}, parts[n:]...)
		}
	}
	return parts
}

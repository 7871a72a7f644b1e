package store

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob"
	"github.com/opendsec/dsec/image"
	"github.com/opendsec/dsec/layer"
)

func stackKey(d layer.Digest) string { return "stacks/" + d.Hex() }

// loadStacks reads all that are here: they are few and small.
func (s *Store) loadStacks() error {
	dirs, err := os.ReadDir(s.path("stacks"))
	if err != nil {
		return err
	}
	for _, dir := range dirs {
		d, err := layer.ParseDigest("sha256:" + dir.Name())
		if err != nil {
			return err
		}
		b, err := os.ReadFile(s.path("stacks", dir.Name(), "stack"))
		if err != nil {
			return err
		}
		st, err := layer.DecodeStack(b, d)
		if err != nil {
			return err
		}
		var a about
		if b, err := os.ReadFile(s.path("stacks", dir.Name(), "info")); err == nil && json.Unmarshal(b, &a) != nil {
			a = about{} // it says nothing that matters
		}
		s.knowLocked(stackInfo(d, st, a))
	}
	return nil
}

// knowLocked notes a stack that is here.
func (s *Store) knowLocked(info layer.Info) {
	s.stacks[info.Digest] = info
	for _, p := range info.Layers {
		s.inside[p.Digest] = append(s.inside[p.Digest], string(info.Digest))
	}
}

// forgetLocked notes that a layer or stack is not here any more.
func (s *Store) forgetLocked(d layer.Digest) {
	delete(s.known, d)
	for _, p := range s.stacks[d].Layers {
		if s.inside[p.Digest] = slices.DeleteFunc(s.inside[p.Digest], func(in string) bool { return in == string(d) }); len(s.inside[p.Digest]) == 0 {
			delete(s.inside, p.Digest)
		}
	}
	delete(s.stacks, d)
}

func stackInfo(d layer.Digest, st layer.Stack, a about) layer.Info {
	return layer.Info{Digest: d, Source: a.Source, Image: true, Config: st.Config, Layers: st.Layers}
}

// PutStack keeps a stack, here and in the blob store, and returns its digest.
// Its layers must be here. The tag, if any, points to it.
func (s *Store) PutStack(ctx context.Context, st layer.Stack, source, tag string) (layer.Info, error) {
	const op = "make stack"
	if err := s.checkTag(tag); err != nil {
		return layer.Info{}, err
	}
	st.Version = layer.StackVersion
	var err error
	if st.Config, err = normal(st.Config); err == nil {
		err = st.Check()
	}
	if err != nil {
		return layer.Info{}, dsec.E(dsec.Invalid, op, source, err)
	}
	for _, p := range st.Layers {
		if _, err := s.manifest(p.Digest); err != nil {
			return layer.Info{}, err
		}
	}
	info, err := s.keepStack(st, about{Source: source})
	if err == nil && s.opts.Blobs != nil {
		err = s.pushBytes(ctx, stackKey(info.Digest), st.Encode())
	}
	if err != nil {
		return layer.Info{}, diskError(op, source, err)
	}
	if tag != "" {
		err = s.Tag(ctx, tag, info.Digest)
	}
	return info, err
}

// keepStack publishes a stack in one step, as layers are.
func (s *Store) keepStack(st layer.Stack, a about) (layer.Info, error) {
	info := stackInfo(st.Digest(), st, a)
	dir, err := os.MkdirTemp(s.path("tmp"), "stack-*")
	if err != nil {
		return info, err
	}
	defer os.RemoveAll(dir)
	said, err := json.Marshal(a)
	if err != nil {
		return info, err
	}
	for name, b := range map[string][]byte{"stack": st.Encode(), "info": said} {
		if err := os.WriteFile(filepath.Join(dir, name), b, 0o600); err != nil {
			return info, err
		}
		if err := syncFile(filepath.Join(dir, name)); err != nil {
			return info, err
		}
	}
	if err := syncFile(dir); err != nil {
		return info, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	err = os.Rename(dir, s.path("stacks", info.Digest.Hex()))
	if errors.Is(err, unix.EEXIST) || errors.Is(err, unix.ENOTEMPTY) {
		return info, s.touch(info.Digest)
	}
	if err == nil {
		err = syncFile(s.path("stacks"))
	}
	if err == nil {
		s.knowLocked(info)
	}
	return info, err
}

// Stack returns a stack that is here.
func (s *Store) Stack(_ context.Context, ref dsec.LayerRef) (layer.Info, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	d, err := s.resolveLocked(ref)
	if err != nil {
		return layer.Info{}, err
	}
	info, ok := s.stacks[d]
	if !ok {
		return layer.Info{}, dsec.Errorf(dsec.NotFound, "read stack", dsec.Quote(string(ref)), "is no stack of this store")
	}
	return info, nil
}

// stackLocked fills a set with the layers that a lease keeps, or, where it is
// new, shall keep; or it names the first thing that is not here.
func (s *Store) stackLocked(set *layer.Set, held lease) (missing layer.Digest, err error) {
	digests := held.means()
	var below []layer.Digest
	if held.Digests == nil {
		if below, missing, err = s.parentsLocked(digests); missing != "" || err != nil {
			return missing, err
		}
	}
	var parts []layer.Part
	for _, d := range append(below, digests...) {
		if st, ok := s.stacks[d]; ok {
			parts = append(parts, st.Layers...)
			set.Config = overlayConfig(set.Config, st.Config)
			continue
		}
		l, err := s.localLocked(d)
		if errors.Is(err, dsec.NotFound.Err()) {
			return d, nil
		}
		if err != nil {
			return "", err
		}
		parts = append(parts, layer.Part{Digest: d})
		set.Config = overlayConfig(set.Config, l.Config)
	}
	if held.Digests != nil {
		parts = parts[:0]
		for _, d := range held.Digests {
			parts = append(parts, layer.Part{Digest: d})
		}
	}
	if parts = layer.TopMost(parts); len(parts) > layer.MaxStack {
		return "", dsec.Errorf(dsec.Invalid, "lease layers", set.Lease, "%d layers, at most %d", len(parts), layer.MaxStack)
	}
	for _, p := range parts {
		l, err := s.localLocked(p.Digest)
		if errors.Is(err, dsec.NotFound.Err()) || s.evicting[p.Digest] != nil {
			return p.Digest, nil
		}
		if err != nil {
			return "", err
		}
		set.Layers = append(set.Layers, l)
	}
	return "", nil
}

// fetchAny makes a layer whole on this machine, or a stack known.
func (s *Store) fetchAny(ctx context.Context, d layer.Digest) error {
	if s.opts.Blobs == nil {
		return s.fetchOnce(ctx, d)
	}
	raw, err := blob.ReadAll(ctx, s.opts.Blobs, stackKey(d), layer.MaxStackSize)
	if dsec.ClassOf(err) == dsec.NotFound {
		return s.fetchOnce(ctx, d)
	}
	if err != nil {
		return err
	}
	st, err := layer.DecodeStack(raw, d)
	if err != nil {
		return err
	}
	if _, err := s.keepStack(st, about{}); err != nil {
		return diskError("fetch stack", string(d), err)
	}
	return nil
}

// Flatten returns the layers that refs stand for, with the refs as what was
// asked for, and the config of all. They are here afterwards.
func (s *Store) Flatten(ctx context.Context, refs []dsec.LayerRef) ([]layer.Part, image.Config, error) {
	lease := "flatten-" + rand.Text()
	set, err := s.Acquire(ctx, lease, refs)
	if err != nil {
		return nil, image.Config{}, err
	}
	s.mu.Lock()
	held := s.leases[lease]
	from := map[layer.Digest]dsec.LayerRef{}
	for i, d := range held.means() {
		from[d] = refs[i]
		for _, p := range s.stacks[d].Layers {
			from[p.Digest] = refs[i]
		}
	}
	s.mu.Unlock()
	var parts []layer.Part
	for _, l := range set.Layers {
		ref, ok := from[l.Digest]
		if !ok {
			ref = refs[0] // it was packed on it
		}
		parts = append(parts, layer.Part{Digest: l.Digest, Ref: ref})
	}
	return parts, set.Config, s.Release(context.WithoutCancel(ctx), lease)
}

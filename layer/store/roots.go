package store

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"os"
	"strings"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob"
	"github.com/opendsec/dsec/layer"
)

// Renew says in the blob store what this store keeps: all layers that are in
// it. It has to be called when the store has been opened, and every ten minutes
// (RenewEvery) or more often. What other nodes may collect depends on it.
func (s *Store) Renew(ctx context.Context) error {
	if s.opts.Blobs == nil {
		return nil
	}
	s.renewing.Lock()
	defer s.renewing.Unlock()
	// Pins that are not of work in progress now are of work whose layers are here,
	// or of a program that has ended; one that comes later is not in this list.
	old, lost, err := s.oldRoots(ctx)
	if err != nil {
		return err
	}
	keep, err := s.keeps()
	if err != nil {
		return err
	}
	r := layer.NewRoot(s.opts.Name, RenewEvery, keep)
	if len(r.Keep) > layer.MaxRootKeys {
		return dsec.Errorf(dsec.Internal, "write root", s.id, "%d objects, at most %d", len(r.Keep), layer.MaxRootKeys)
	}
	// A new key each time: an earlier write that was given up may yet be carried
	// out, and must not replace this one.
	root := layer.RootPrefix + s.id + "/" + dsec.Random(20)
	written := &pin{s: s, keys: []string{root}, here: time.Now()}
	if err := s.opts.Blobs.Put(ctx, root, bytes.NewReader(r.Encode()), blob.PutOptions{}); err != nil {
		return err
	}
	if lost {
		if err := s.restore(ctx); err != nil {
			return err
		}
	}
	if err := s.writeFile("rooted", []byte(root+"\n"), true); err != nil {
		return diskError("write root", s.id, err)
	}
	// A collector that lists roots now may come too late for the old one and too early for
	// the new: the old one stays until a root is written while none is at work.
	if runs, err := written.runs(ctx); err != nil || len(runs) > 0 {
		return err
	}
	for _, key := range old {
		if err := s.opts.Blobs.Delete(ctx, key); err != nil {
			return err
		}
	}
	return nil
}

// RenewEvery is how often Renew wants to be called.
const RenewEvery = 10 * time.Minute

// oldRoots lists what of this store has to go when its root is written, and
// whether it had written one that is gone: then it has been away so long that
// what it keeps may have been removed.
func (s *Store) oldRoots(ctx context.Context) (old []string, lost bool, err error) {
	b, err := s.readOptional("rooted")
	if err != nil {
		return nil, false, err
	}
	last := strings.TrimSpace(string(b))
	lost = last != ""
	for info, err := range s.opts.Blobs.List(ctx, layer.RootPrefix+s.id+"/") {
		if err != nil {
			return nil, false, err
		}
		s.mu.Lock()
		working := s.pins[info.Key]
		s.mu.Unlock()
		if info.Key == last {
			lost = false
		}
		if !working {
			old = append(old, info.Key)
		}
	}
	return old, lost, nil
}

// keeps lists the keys of what is here.
func (s *Store) keeps() ([]string, error) {
	layers, err := s.here("layers")
	if err != nil {
		return nil, err
	}
	stacks, err := s.here("stacks")
	if err != nil {
		return nil, err
	}
	keep, err := s.keptCheckpoints()
	if err != nil {
		return nil, err
	}
	for _, d := range stacks {
		keep = append(keep, layer.KindStack.Key(d))
	}
	for _, d := range layers {
		keep = append(keep, layer.ManifestKey(d))
		packs, err := s.namedPacks(d)
		if err != nil {
			return nil, err
		}
		keep = append(keep, packs...)
	}
	return keep, nil
}

// here lists what is in a directory of the store, by its names.
func (s *Store) here(kind string) ([]layer.Digest, error) {
	dirs, err := os.ReadDir(s.path(kind))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	var out []layer.Digest
	for _, dir := range dirs {
		d, perr := layer.ParseDigest("sha256:" + dir.Name())
		if perr != nil {
			return nil, perr
		}
		out = append(out, d)
	}
	return out, diskError("list what is kept", s.path(kind), err)
}

// namedPacks are the packs from which a layer that is not whole is fetched.
func (s *Store) namedPacks(d layer.Digest) ([]string, error) {
	raw, err := s.readOptional("layers", d.Hex(), layer.IndexFile)
	if raw == nil || err != nil {
		return nil, diskError("read layer", string(d), err)
	}
	m, err := s.manifest(d)
	if errors.Is(err, dsec.NotFound.Err()) {
		return nil, nil // just collected here
	}
	if err != nil {
		return nil, err
	}
	ix, err := layer.DecodeIndex(raw, m.Data)
	if err != nil {
		return nil, err
	}
	return packKeys(ix), nil
}

func packKeys(ix layer.Index) []string {
	keys := make([]string, 0, len(ix.Packs))
	for _, d := range ix.Packs {
		keys = append(keys, layer.PackKey(d))
	}
	return keys
}

// restore puts layers and stacks back that were removed while this store said
// nothing.
func (s *Store) restore(ctx context.Context) error {
	layers, err := s.here("layers")
	if err != nil {
		return err
	}
	for _, d := range layers {
		packs, err := s.namedPacks(d)
		if err != nil {
			return err
		}
		if packs != nil { // not whole: it cannot be made again from here
			if err := s.present(ctx, packs); err != nil {
				s.opts.Log.Error("a layer that is not whole here was removed from the blob store while this node was away", "layer", d, "err", err)
			}
			continue
		}
		if err := s.push(ctx, d); err != nil && dsec.ClassOf(err) != dsec.NotFound { // just collected here
			return err
		}
	}
	stacks, err := s.here("stacks")
	if err != nil {
		return err
	}
	for _, d := range stacks {
		b, err := s.readOptional("stacks", d.Hex(), "stack")
		if err == nil && b != nil {
			err = s.pushBytes(ctx, layer.KindStack.Key(d), b)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// pushBytes announces and writes a small object that this store keeps.
func (s *Store) pushBytes(ctx context.Context, key string, b []byte) error {
	p, err := s.announce(ctx, key)
	if err == nil {
		err = s.put(ctx, key, bytes.NewReader(b))
	}
	p.release(ctx, err == nil)
	return err
}

// present looks whether objects are there, and says which is not.
func (s *Store) present(ctx context.Context, keys []string) error {
	return each(keys, func(key string) error {
		_, err := s.opts.Blobs.Stat(ctx, key)
		return err
	})
}

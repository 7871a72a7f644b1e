package store

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/layer"
)

// Evict gives back the room that a layer's data take on this machine: they come
// again, on demand, from the blob store. It is refused while the layer is
// leased, for what is mounted then is plain files.
func (s *Store) Evict(ctx context.Context, ref dsec.LayerRef) error {
	const op = "evict layer"
	s.mu.Lock()
	d, err := s.resolveLocked(ref)
	s.mu.Unlock()
	if err != nil {
		return err
	}
	if s.opts.Blobs == nil || !s.opts.OnDemand {
		return dsec.Errorf(dsec.Unsupported, op, string(d), "there is nothing that brings its data again")
	}
	if err := s.push(ctx, d); err != nil {
		return diskError(op, string(d), err)
	}
	e, err := s.Inspect(ctx, dsec.LayerRef(d))
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp(s.path("tmp"), "evict-*")
	if err != nil {
		return diskError(op, string(d), err)
	}
	defer os.RemoveAll(dir)
	fresh, old := filepath.Join(dir, "new"), filepath.Join(dir, "old")
	if err := os.Mkdir(fresh, 0o700); err != nil {
		return diskError(op, string(d), err)
	}
	m, ix, err := s.fetchInto(ctx, fresh, d)
	if err == nil {
		err = s.complement(fresh, m, ix, about{Source: e.Source, Image: &e.Image, Lineage: e.Lineage})
	}
	if err == nil {
		err = syncDir(fresh)
	}
	if err != nil {
		return diskError(op, string(d), err)
	}
	return diskError(op, string(d), s.swap(d, fresh, old))
}

// swap puts a directory in the place of a layer that nobody leases.
func (s *Store) swap(d layer.Digest, fresh, old string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for name, held := range s.leases {
		for _, x := range held.Digests {
			if x == d {
				return dsec.Errorf(dsec.IllegalState, "evict layer", string(d), "leased by %s", name)
			}
		}
	}
	if err := os.Rename(s.path("layers", d.Hex()), old); err != nil {
		return err
	}
	delete(s.known, d)
	if err := os.Rename(fresh, s.path("layers", d.Hex())); err != nil {
		return errors.Join(err, os.Rename(old, s.path("layers", d.Hex())))
	}
	return syncFile(s.path("layers"))
}

// complement puts the small files of a layer beside its large ones.
func (s *Store) complement(dir string, m layer.Manifest, ix layer.Index, from about) error {
	about, err := json.Marshal(from)
	if err != nil {
		return err
	}
	for name, b := range map[string][]byte{layer.ManifestFile: m.Encode(), layer.TableFile: ix.Table(), layer.InfoFile: about} {
		if err := os.WriteFile(filepath.Join(dir, name), b, 0o600); err != nil {
			return err
		}
	}
	// A mapping of the file by huge pages must not end before the file.
	return os.Truncate(filepath.Join(dir, layer.DataFile), alignUp(m.Data.Size))
}

// syncDir makes durable what is in a directory.
func syncDir(dir string) error {
	files, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, f := range files {
		if err := syncFile(filepath.Join(dir, f.Name())); err != nil {
			return err
		}
	}
	return syncFile(dir)
}

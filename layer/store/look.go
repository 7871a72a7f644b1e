package store

import (
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"io/fs"
	"os"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/fault"
	"github.com/opendsec/dsec/internal/within"
	"github.com/opendsec/dsec/layer"
)

// Viewer looks at a store that another program may have open: a layer that is
// there does not change, it can only go.
type Viewer struct{ s *Store }

// Look opens a store to be looked at. Nothing in it is written.
func Look(dir string) (*Viewer, error) {
	if _, err := os.Stat(dir); err != nil {
		return nil, diskError("open layer store", dir, err)
	}
	return &Viewer{&Store{shared: &shared{dir: dir, leases: map[string]lease{}, known: map[layer.Digest]layer.Local{}}}}, nil
}

// Layers lists what is there.
func (v *Viewer) Layers() ([]layer.Digest, error) {
	dirs, err := os.ReadDir(v.s.path("layers"))
	if err != nil {
		return nil, diskError("list layers", v.s.dir, err)
	}
	var out []layer.Digest
	for _, dir := range dirs {
		d, err := layer.ParseDigest("sha256:" + dir.Name())
		if err != nil {
			return nil, err
		}
		out = append(out, d)
	}
	return out, nil
}

// Resolve turns a tag or digest into a digest.
func (v *Viewer) Resolve(ref dsec.LayerRef) (layer.Digest, error) {
	v.s.mu.Lock()
	defer v.s.mu.Unlock()
	return v.s.resolveLocked(ref)
}

// Verified is how much of a layer was compared with its digest.
type Verified struct {
	Digest layer.Digest `json:"digest"`
	Chunks int64        `json:"chunks"` // that are here
	Of     int64        `json:"of"`
}

// Verify compares what is here of a layer with its digest. NotFound if it is
// not here, or went while it was read.
func (v *Viewer) Verify(ctx context.Context, d layer.Digest) (Verified, error) {
	n, of, err := v.s.verify(ctx, d)
	return Verified{d, n, of}, err
}

// verify compares the bytes that are here of a layer with its digest.
func (s *Store) verify(ctx context.Context, d layer.Digest) (chunks, of int64, err error) {
	const op = "verify layer"
	m, err := s.manifest(d)
	if err != nil {
		return 0, 0, err
	}
	if err = s.verifyMeta(ctx, d, m); err == nil && m.Data.Size > 0 {
		chunks, err = s.verifyData(ctx, d, m)
	}
	if errors.Is(err, fs.ErrNotExist) {
		if _, gone := s.manifest(d); gone != nil {
			return chunks, m.Data.Count, gone
		}
	}
	if err != nil {
		err = dsec.E(fault.Class(err, dsec.Corrupt), op, string(d), err)
	}
	return chunks, m.Data.Count, err
}

func (s *Store) verifyMeta(ctx context.Context, d layer.Digest, m layer.Manifest) error {
	meta, err := os.Open(s.path("layers", d.Hex(), layer.MetaFile))
	if err != nil {
		return err
	}
	defer meta.Close()
	h := sha256.New()
	n, err := io.Copy(h, within.Reader(ctx, io.LimitReader(meta, m.Meta.Size))) // behind it may be a hole
	if err != nil {
		return err
	}
	if n != m.Meta.Size || layer.FromSum(h.Sum(nil)) != m.Meta.Digest {
		return errors.New("metadata: content has another digest")
	}
	return nil
}

func (s *Store) verifyData(ctx context.Context, d layer.Digest, m layer.Manifest) (chunks int64, err error) {
	table, err := os.ReadFile(s.path("layers", d.Hex(), layer.TableFile))
	if err != nil {
		return 0, err
	}
	ix, err := layer.DecodeTable(table, m.Data)
	if err != nil {
		return 0, err
	}
	data, err := os.Open(s.path("layers", d.Hex(), layer.DataFile))
	if err != nil {
		return 0, err
	}
	defer data.Close()
	has := all
	present, err := os.Open(s.path("layers", d.Hex(), layer.PresentFile))
	if err == nil {
		defer present.Close()
		has, err = layer.ReadPresence(present, len(ix.Chunks))
	} else if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	if err != nil {
		return 0, err
	}
	return ix.Verify(ctx, data, has)
}

// all is what is here of a layer that is whole.
func all(int) bool { return true }

package store

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/image"
	"github.com/opendsec/dsec/image/erofs"
	"github.com/opendsec/dsec/internal/fault"
	"github.com/opendsec/dsec/internal/within"
	"github.com/opendsec/dsec/layer"
)

// RepackedFrom is what the source of a repacked layer begins with; the digest of
// the other one follows.
const RepackedFrom = "repacked from "

// Repack makes a layer with the same tree whose data begin with what the trace
// expects to be read, in its order. What was expected is stored in packs of its
// own, and the trace goes with it. No tag moves. A layer whose data are not whole
// here is fetched aside for it.
func (s *Store) Repack(ctx context.Context, ref dsec.LayerRef, t layer.Trace) (layer.Info, error) {
	const op = "repack layer"
	s.mu.Lock()
	d, err := s.resolveLocked(ref)
	s.mu.Unlock()
	if err != nil {
		return layer.Info{}, err
	}
	if t.Layer != d {
		return layer.Info{}, dsec.Errorf(dsec.Invalid, op, string(d), "the trace is of layer %s", t.Layer)
	}
	if len(t.Ranges()) == 0 {
		return layer.Info{}, dsec.Errorf(dsec.Invalid, op, string(d), "the trace expects nothing to be read")
	}
	if _, err := s.manifest(d); errors.Is(err, dsec.NotFound.Err()) {
		if err := s.fetchOnce(ctx, d); err != nil {
			return layer.Info{}, err
		}
	}
	enc, err := t.Encode()
	if err != nil {
		return layer.Info{}, err
	}
	return s.once(ctx, "repack "+string(layer.DigestOf(enc)), func() (layer.Info, error) {
		info, err := s.repack(ctx, d, t)
		if err != nil {
			err = diskError(op, string(d), err)
		}
		return info, err
	})
}

func (s *Store) repack(ctx context.Context, d layer.Digest, t layer.Trace) (layer.Info, error) {
	s.mu.Lock()
	old, err := s.localLocked(d)
	s.mu.Unlock()
	if err != nil {
		return layer.Info{}, err
	}
	dir, err := os.MkdirTemp(s.path("tmp"), "repack-*")
	if err != nil {
		return layer.Info{}, err
	}
	defer os.RemoveAll(dir) // what stays is swept at the next Open
	data, aside, err := s.wholeData(ctx, old)
	if err != nil {
		return layer.Info{}, err
	}
	defer data.Close()
	var files image.Files
	if err := create(dir, &files); err != nil {
		return layer.Info{}, err
	}
	defer closeAll(files)
	a, err := rearrange(files, old, within.ReaderAt(ctx, data), t)
	if err != nil {
		return layer.Info{}, err
	}
	if !aside && !stillWhole(data, old) {
		return layer.Info{}, dsec.Errorf(dsec.Unavailable, "repack layer", string(d), "its data were given back meanwhile; try again")
	}
	first := int64(a.First) * erofs.BlockSize
	info, err := s.seal(dir, files, old.Config, about{Source: RepackedFrom + string(d), Image: &old.Image, Lineage: old.Lineage}, first)
	if err != nil {
		return layer.Info{}, err
	}
	if err := s.pushAnew(ctx, info.Digest, first); err != nil {
		return layer.Info{}, err
	}
	return info, s.moveTrace(ctx, t, info.Digest, a)
}

// rearrange writes the metadata and data of the new layer.
func rearrange(files image.Files, old layer.Local, data io.ReaderAt, t layer.Trace) (erofs.Arrangement, error) {
	var none erofs.Arrangement
	meta, err := os.Open(old.Meta)
	if err != nil {
		return none, err
	}
	defer meta.Close()
	im, err := erofs.Open(meta, old.MetaSize, nil)
	if err != nil {
		return none, err
	}
	root, err := im.Tree()
	if err != nil {
		return none, err
	}
	var first []erofs.Part
	for _, r := range t.Ranges() {
		first = append(first, erofs.Part{Block: uint32(r.Off / erofs.BlockSize), Count: uint32(r.Len / erofs.BlockSize)})
	}
	a, err := erofs.Arrange(root, first)
	if err != nil {
		return none, err
	}
	if err := a.Copy(files.Data, data); err != nil {
		return none, err
	}
	_, err = erofs.Write(files.Meta, root, a.Blocks)
	return a, err
}

// wholeData opens data that are whole and verified: those of the layer, or, aside,
// a copy without a name that is fetched for it.
func (s *Store) wholeData(ctx context.Context, l layer.Local) (data *os.File, aside bool, err error) {
	if l.DataSize == 0 {
		return nil, false, dsec.Errorf(dsec.Invalid, "repack layer", string(l.Digest), "it has no data")
	}
	m, err := s.manifest(l.Digest)
	if err != nil {
		return nil, false, err
	}
	whole, err := l.Whole()
	if err != nil {
		return nil, false, err
	}
	if !whole {
		data, err = s.fetchAside(ctx, m)
		return data, true, err
	}
	if data, err = os.Open(l.Data); err != nil {
		return nil, false, err
	}
	table, err := os.ReadFile(s.path("layers", l.Digest.Hex(), layer.TableFile))
	if err == nil {
		var ix layer.Index
		if ix, err = layer.DecodeTable(table, m.Data); err == nil {
			_, err = ix.Verify(ctx, data, all)
		}
	}
	if err != nil {
		data.Close()
		return nil, false, dsec.E(fault.Class(err, dsec.Corrupt), "read layer", string(l.Digest), err)
	}
	return data, false, nil
}

// stillWhole says whether what was copied was what had been verified: data get
// holes again only with a presence beside them.
func stillWhole(data *os.File, l layer.Local) bool {
	opened, err := data.Stat()
	if err != nil {
		return false
	}
	there, err := os.Stat(l.Data)
	if err != nil || !os.SameFile(opened, there) {
		return false
	}
	whole, err := l.Whole()
	return err == nil && whole
}

// fetchAside fetches all data of a layer into a file without a name.
func (s *Store) fetchAside(ctx context.Context, m layer.Manifest) (*os.File, error) {
	if s.opts.Blobs == nil {
		return nil, dsec.Errorf(dsec.Unavailable, "fetch layer", string(m.Digest()), "its data are not whole here, and there is no store to fetch from")
	}
	dir, err := os.MkdirTemp(s.path("tmp"), "aside-*")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	if err := os.WriteFile(filepath.Join(dir, layer.DataFile), nil, 0o600); err != nil {
		return nil, err
	}
	ix, _, err := s.fetchIndex(ctx, dir, m)
	if err != nil {
		return nil, err
	}
	if err := s.fill(ctx, dir, m, ix); err != nil {
		return nil, err
	}
	return os.Open(filepath.Join(dir, layer.DataFile))
}

// moveTrace gives the new layer the trace of the old, unless it has one that
// knows as much.
func (s *Store) moveTrace(ctx context.Context, t layer.Trace, to layer.Digest, a erofs.Arrangement) error {
	if t.Layer == to {
		return nil
	}
	leave, err := s.aloneWith(ctx, to)
	if err != nil {
		return err
	}
	defer leave()
	if have, err := s.bestTrace(ctx, to); err != nil || have.Recordings >= t.Recordings {
		return err
	}
	moved := t.Moved(to, func(r layer.Range) []layer.Range {
		block, ok := a.Place(uint32(r.Off / erofs.BlockSize))
		if !ok {
			return nil
		}
		return []layer.Range{{Off: int64(block) * erofs.BlockSize, Len: r.Len}}
	})
	return s.keepTrace(ctx, moved, true)
}

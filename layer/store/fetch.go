package store

import (
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"os"
	"path/filepath"

	"github.com/klauspost/compress/zstd"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob"
	"github.com/opendsec/dsec/image"
	"github.com/opendsec/dsec/layer"
)

// fetchOnce brings a layer to this machine: its metadata, and its data, or the
// places from which they come on demand.
func (s *Store) fetchOnce(ctx context.Context, d layer.Digest) error {
	const op = "fetch layer"
	if s.opts.Blobs == nil {
		return dsec.Errorf(dsec.NotFound, op, string(d), "not on this machine, and there is no store to fetch from")
	}
	_, err := s.once(ctx, "fetch "+string(d), func() (layer.Info, error) {
		info, err := s.fetch(ctx, d)
		if err != nil {
			err = diskError(op, string(d), err)
		}
		return info, err
	})
	return err
}

func (s *Store) fetch(ctx context.Context, d layer.Digest) (info layer.Info, err error) {
	p, err := s.announce(ctx, layer.ManifestKey(d))
	if err != nil {
		return layer.Info{}, err
	}
	defer func() { p.release(ctx, err == nil) }()
	dir, err := os.MkdirTemp(s.path("tmp"), "fetch-*")
	if err != nil {
		return layer.Info{}, err
	}
	defer os.RemoveAll(dir)
	m, ix, err := s.fetchInto(ctx, dir, d)
	if err != nil {
		return layer.Info{}, err
	}
	lineage, err := s.fetchLineage(ctx, d)
	if err != nil {
		return layer.Info{}, err
	}
	return s.finish(dir, m, ix, about{Lineage: lineage})
}

// fetchInto fills a directory with what a layer is here.
func (s *Store) fetchInto(ctx context.Context, dir string, d layer.Digest) (m layer.Manifest, ix layer.Index, err error) {
	raw, err := blob.ReadAll(ctx, s.opts.Blobs, layer.ManifestKey(d), layer.MaxManifest)
	if err != nil {
		return m, ix, err
	}
	if m, err = layer.DecodeManifest(raw, d); err != nil {
		return m, ix, err
	}
	var files image.Files
	if err = create(dir, &files); err != nil {
		return m, ix, err
	}
	defer closeAll(files)
	if err = s.fetchMeta(ctx, m, files.Meta); err == nil && m.Data.Size > 0 {
		ix, err = s.fetchData(ctx, dir, m)
	}
	return m, ix, err
}

func (s *Store) fetchMeta(ctx context.Context, m layer.Manifest, to io.Writer) error {
	r, err := s.opts.Blobs.Open(ctx, layer.MetaKey(m.Meta.Digest), 0, -1)
	if err != nil {
		return err
	}
	defer r.Close()
	z, err := zstd.NewReader(r, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(64<<20))
	if err != nil {
		return err
	}
	defer z.Close()
	h := sha256.New()
	n, err := io.Copy(io.MultiWriter(to, h), io.LimitReader(z, m.Meta.Size+1))
	if err != nil {
		if dsec.ClassOf(err) == dsec.Internal {
			err = dsec.E(dsec.Corrupt, "read metadata", string(m.Meta.Digest), err)
		}
		return err
	}
	if n != m.Meta.Size || layer.FromSum(h.Sum(nil)) != m.Meta.Digest {
		return dsec.Errorf(dsec.Corrupt, "read metadata", string(m.Meta.Digest), "content has another digest")
	}
	return nil
}

// fetchData writes down where the data are, and brings them if they are few or
// nobody would bring them on demand.
func (s *Store) fetchData(ctx context.Context, dir string, m layer.Manifest) (layer.Index, error) {
	ix, raw, err := s.fetchIndex(ctx, dir, m)
	if err != nil {
		return ix, err
	}
	if s.opts.OnDemand && m.Data.Size > s.opts.Small {
		return ix, os.WriteFile(filepath.Join(dir, layer.IndexFile), raw, 0o600)
	}
	if err := s.fill(ctx, dir, m, ix); err != nil {
		return ix, err
	}
	return ix, os.Remove(filepath.Join(dir, layer.PresentFile))
}

// fetchIndex reads where the data are, and makes the files that they come into.
func (s *Store) fetchIndex(ctx context.Context, dir string, m layer.Manifest) (ix layer.Index, raw []byte, err error) {
	if raw, err = blob.ReadAll(ctx, s.opts.Blobs, layer.IndexKey(m.Data.Chunks), layer.MaxIndex); err != nil {
		return ix, nil, err
	}
	if ix, err = layer.DecodeIndex(raw, m.Data); err != nil {
		return ix, nil, err
	}
	if err = os.Truncate(filepath.Join(dir, layer.DataFile), m.Data.Size); err != nil {
		return ix, nil, err
	}
	return ix, raw, layer.CreatePresence(filepath.Join(dir, layer.PresentFile), len(ix.Chunks))
}

// Promote makes a layer whole whose data have all come: from then on it is
// plain files. It is none yet if some have not.
func (s *Store) Promote(d layer.Digest) error {
	const op = "complete layer"
	m, err := s.manifest(d)
	if err != nil {
		return err
	}
	f, err := os.OpenFile(s.path("layers", d.Hex(), layer.PresentFile), os.O_RDWR, 0)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return diskError(op, string(d), err)
	}
	present, err := layer.OpenPresence(f, int(m.Data.Count))
	if err != nil {
		return err
	}
	defer present.Close()
	if !present.Complete() {
		return dsec.Errorf(dsec.IllegalState, op, string(d), "%d of %d chunks are here", present.Count(), m.Data.Count)
	}
	if err := syncFile(s.path("layers", d.Hex(), layer.DataFile)); err != nil {
		return diskError(op, string(d), err)
	}
	for _, name := range []string{layer.PresentFile, layer.IndexFile} {
		if err := os.Remove(s.path("layers", d.Hex(), name)); err != nil {
			return diskError(op, string(d), err)
		}
	}
	return diskError(op, string(d), syncFile(s.path("layers", d.Hex())))
}

// Here says how many chunks of a layer's data are on this machine, and of how many.
func (s *Store) Here(d layer.Digest) (here, of int, err error) {
	m, err := s.manifest(d)
	if err != nil {
		return 0, 0, err
	}
	of = int(m.Data.Count)
	f, err := os.OpenFile(s.path("layers", d.Hex(), layer.PresentFile), os.O_RDWR, 0)
	if errors.Is(err, os.ErrNotExist) {
		return of, of, nil
	}
	if err != nil {
		return 0, of, diskError("look at layer", string(d), err)
	}
	present, err := layer.OpenPresence(f, of)
	if err != nil {
		return 0, of, err
	}
	return present.Count(), of, present.Close()
}

// promoteAll does what nobody was there for when the last data of a layer came.
func (s *Store) promoteAll() error {
	files, err := filepath.Glob(s.path("layers", "*", layer.PresentFile))
	if err != nil {
		return err
	}
	for _, f := range files {
		d, err := layer.ParseDigest("sha256:" + filepath.Base(filepath.Dir(f)))
		if err != nil {
			return err
		}
		if err := s.Promote(d); err != nil && dsec.ClassOf(err) != dsec.IllegalState {
			s.opts.Log.Warn("complete layer", "layer", d, "err", err)
		}
	}
	return nil
}

package store

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/layer/ondemand"
)

// OpenData implements layer.Store. What is not here is fetched into a file that
// goes with the reader: the layer's own file is the loader's.
func (s *Store) OpenData(ctx context.Context, l layer.Local) (layer.Data, error) {
	const op = "open data of layer"
	if l.DataSize == 0 {
		return struct {
			io.ReaderAt
			io.Closer
		}{strings.NewReader(""), io.NopCloser(nil)}, nil
	}
	// Opened first: what is evicted afterwards is another file.
	f, err := os.Open(l.Data)
	if err != nil {
		return nil, diskError(op, string(l.Digest), err)
	}
	whole, err := l.Whole()
	if err == nil && whole {
		return f, nil
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return nil, err
	}
	r, err := s.openPartial(ctx, l)
	if err != nil {
		return nil, diskError(op, string(l.Digest), err)
	}
	return r, nil
}

func (s *Store) openPartial(ctx context.Context, l layer.Local) (layer.Data, error) {
	m, err := s.manifest(l.Digest)
	if err != nil {
		return nil, err
	}
	raw, err := os.ReadFile(s.path("layers", l.Digest.Hex(), layer.IndexFile))
	if errors.Is(err, os.ErrNotExist) { // it has become whole since it was looked at
		return os.Open(l.Data)
	}
	if err != nil {
		return nil, err
	}
	ix, err := layer.DecodeIndex(raw, m.Data)
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp(s.path("tmp"), "read-*")
	if err != nil {
		return nil, err
	}
	d, err := s.openPrivate(dir, m, ix)
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	return &reading{ctx: ctx, l: d, dir: dir}, nil
}

// openPrivate opens data in a directory where nobody else reads them.
func (s *Store) openPrivate(dir string, m layer.Manifest, ix layer.Index) (*ondemand.Layer, error) {
	present := filepath.Join(dir, layer.PresentFile)
	if _, err := os.Stat(present); errors.Is(err, os.ErrNotExist) {
		if err := layer.CreatePresence(present, len(ix.Chunks)); err != nil {
			return nil, err
		}
	}
	data, err := os.OpenFile(filepath.Join(dir, layer.DataFile), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	f, err := os.OpenFile(present, os.O_RDWR, 0)
	if err != nil {
		return nil, errors.Join(err, data.Close())
	}
	p, err := layer.OpenPresence(f, len(ix.Chunks))
	if err != nil {
		return nil, errors.Join(err, data.Close())
	}
	l, err := ondemand.Open(ondemand.Parts{Digest: m.Digest(), Index: ix, Data: data, Present: p}, ondemand.Options{Blobs: s.opts.Blobs, Lanes: s.lanes})
	if err != nil {
		return nil, errors.Join(err, p.Close(), data.Close())
	}
	return l, nil
}

// reading is a layer whose data come as they are read.
type reading struct {
	ctx context.Context // of whoever reads
	l   *ondemand.Layer
	dir string
}

func (r *reading) ReadAt(p []byte, off int64) (int, error) {
	n, err := r.l.ReadAt(r.ctx, p, off)
	if err == nil && n < len(p) {
		err = io.EOF
	}
	return n, err
}

func (r *reading) Close() error { return errors.Join(r.l.Close(), os.RemoveAll(r.dir)) }

// fill fetches all data of a layer that nobody serves.
func (s *Store) fill(ctx context.Context, dir string, m layer.Manifest, ix layer.Index) error {
	l, err := s.openPrivate(dir, m, ix)
	if err != nil {
		return err
	}
	if err = l.Fill(ctx); err == nil {
		err = l.Sync()
	}
	return errors.Join(err, l.Close())
}

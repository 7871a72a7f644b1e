package store

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"

	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/layer/ondemand"
)

// openData opens the data of a layer that is here to read them, all of them if
// need be: what is not on this machine is fetched as it is read, into a file
// that goes with the reader. The layer's own file is the loader's.
func (s *Store) openData(l layer.Local) (io.ReaderAt, func(), error) {
	whole, err := l.Whole()
	if err != nil {
		return nil, nil, err
	}
	if whole {
		f, err := os.Open(l.Data)
		if err != nil {
			return nil, nil, err
		}
		return f, func() { f.Close() }, nil
	}
	m, err := s.manifest(l.Digest)
	if err != nil {
		return nil, nil, err
	}
	raw, err := os.ReadFile(s.path("layers", l.Digest.Hex(), layer.IndexFile))
	if err != nil {
		return nil, nil, err
	}
	ix, err := layer.DecodeIndex(raw, m.Data)
	if err != nil {
		return nil, nil, err
	}
	dir, err := os.MkdirTemp(s.path("tmp"), "read-*")
	if err != nil {
		return nil, nil, err
	}
	d, err := s.openPrivate(dir, m, ix)
	if err != nil {
		return nil, nil, errors.Join(err, os.RemoveAll(dir))
	}
	return reading{d}, func() {
		if err := errors.Join(d.Close(), os.RemoveAll(dir)); err != nil {
			s.opts.Log.Warn("close layer", "layer", l.Digest, "err", err)
		}
	}, nil
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
type reading struct{ l *ondemand.Layer }

func (r reading) ReadAt(p []byte, off int64) (int, error) {
	n, err := r.l.ReadAt(context.Background(), p, off)
	if err == nil && n < len(p) {
		err = io.EOF
	}
	return n, err
}

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

package store

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/layer"
)

// manifest reads and verifies the manifest of a layer that is here.
func (s *Store) manifest(d layer.Digest) (layer.Manifest, error) {
	b, err := os.ReadFile(s.path("layers", d.Hex(), "manifest"))
	if errors.Is(err, fs.ErrNotExist) {
		return layer.Manifest{}, dsec.Errorf(dsec.NotFound, "read layer", string(d), "not in this store")
	}
	if err != nil {
		return layer.Manifest{}, diskError("read layer", string(d), err)
	}
	return layer.DecodeManifest(b, d)
}

// local describes a layer that is here.
func (s *Store) local(d layer.Digest) (layer.Local, error) {
	m, err := s.manifest(d)
	if err != nil {
		return layer.Local{}, err
	}
	l := layer.Local{
		Info: layer.Info{Digest: d, MetaSize: m.Meta.Size, DataSize: m.Data.Size, Entries: m.Entries, Config: m.Config},
		Meta: s.path("layers", d.Hex(), "meta"),
	}
	if m.Data.Size > 0 {
		l.Data = s.path("layers", d.Hex(), "data")
	}
	// Where it came from is for people and not part of the layer.
	if b, err := os.ReadFile(s.path("layers", d.Hex(), "info")); err == nil {
		var about layer.Info
		if json.Unmarshal(b, &about) == nil {
			l.Source = about.Source
		}
	}
	return l, nil
}

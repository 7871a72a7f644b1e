package ondemandtest

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/image"
	"github.com/opendsec/dsec/image/erofs"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/layer/store"
)

// EachWay runs a test over layers whose data come to their mounts in every way:
// as plain files, and by each mechanism, when nothing of them is here at first.
// The test mounts what Device says.
func EachWay(t *testing.T, test func(testing.TB)) {
	t.Run("plain", func(t *testing.T) { test(t) })
	for _, m := range []Mechanism{overFUSE, byEvents} {
		t.Run(m.Name, func(t *testing.T) {
			if err := m.Supported(t.TempDir()); err != nil {
				t.Skip(err)
			}
			test(&way{t, m})
		})
	}
}

// way is a test over layers that a mechanism brings.
type way struct {
	*testing.T
	m Mechanism
}

// Device is what the metadata of a layer with these data are to be mounted with:
// the data file itself; or, in a test of EachWay, that of a machine which has
// nothing of it yet. It is there until the test ends.
func Device(t testing.TB, meta, data string) string {
	t.Helper()
	w, ok := t.(*way)
	if !ok {
		return data
	}
	dir := t.TempDir()
	o := &Origin{Backend: Backend{Name: "files", URL: "file://" + dir, Dir: dir}}
	o.push(t, func(s *store.Store) (layer.Info, error) {
		return s.Add(context.Background(), layer.New{Source: meta}, func(f image.Files) (dsec.Lineage, error) {
			return dsec.Lineage{Version: dsec.LineageVersion}, copyLayer(f, meta, data)
		})
	})
	x := newMachine(t, w.m, o, t.TempDir())
	same, err := equal(meta, filepath.Join(x.dir, layer.MetaFile))
	if err != nil || !same {
		t.Fatalf("the metadata that came are others: %v", err)
	}
	return x.at.Device
}

// copyLayer leaves out what a store has behind the data.
func copyLayer(to image.Files, meta, data string) error {
	err := errors.Join(copyInto(to.Meta, meta), copyInto(to.Data, data))
	if err != nil {
		return err
	}
	st, err := to.Meta.Stat()
	if err != nil {
		return err
	}
	im, err := erofs.Open(to.Meta, st.Size(), nil)
	if err != nil {
		return err
	}
	return to.Data.Truncate(int64(im.DataBlocks()) * erofs.BlockSize)
}

func copyInto(to *os.File, from string) error {
	f, err := os.Open(from)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = io.Copy(to, f)
	return err
}

func equal(a, b string) (bool, error) {
	x, err := os.ReadFile(a)
	if err != nil {
		return false, err
	}
	y, err := os.ReadFile(b)
	return string(x) == string(y), err
}

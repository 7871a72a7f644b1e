package store

import (
	"bytes"
	"os"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/image"
	"github.com/opendsec/dsec/layer"
)

// TestNobodyReadsTheHolesOfAPartialLayer: what is made of layers whose data are
// not here has the right bytes, and a layer is not called broken for what has
// not come.
func TestNobodyReadsTheHolesOfAPartialLayer(t *testing.T) {
	ctx, blobs := t.Context(), openBucket(t, t.TempDir())
	here := openStore(t, t.TempDir(), Options{Blobs: blobs})
	base, err := here.Import(ctx, tree(t, map[string]string{"a": varied()}), "", image.Options{})
	if err != nil {
		t.Fatal(err)
	}
	top, err := here.Add(ctx, layer.New{}, oneFile("top", dsec.Lineage{Version: 1, Parents: []string{string(base.Digest)}}))
	if err != nil {
		t.Fatal(err)
	}
	there := openStore(t, t.TempDir(), Options{Blobs: blobs, OnDemand: true, Small: 1})
	set, err := there.Acquire(ctx, "l", []dsec.LayerRef{dsec.LayerRef(top.Digest)})
	if err != nil || len(set.Layers) != 2 {
		t.Fatal(set, err)
	}
	for _, l := range set.Layers {
		if whole, err := l.Whole(); err != nil || whole {
			t.Fatalf("%s is whole, %v: the test tests nothing", l.Digest, err)
		}
		want, err := os.ReadFile(here.path("layers", l.Digest.Hex(), layer.DataFile))
		if err != nil {
			t.Fatal(err)
		}
		data, err := there.OpenData(ctx, l)
		if err != nil {
			t.Fatal(err)
		}
		got := make([]byte, l.DataSize)
		if _, err := data.ReadAt(got, 0); err != nil || !bytes.Equal(got, want[:l.DataSize]) {
			t.Errorf("%s: other bytes, %v", l.Digest, err)
		}
		if err := data.Close(); err != nil {
			t.Error(err)
		}
		if err := there.Verify(ctx, dsec.LayerRef(l.Digest)); err != nil {
			t.Errorf("nothing of it is here and nothing is wrong: %v", err)
		}
	}
	var a, b bytes.Buffer
	if err := here.Export(ctx, dsec.LayerRef(top.Digest), &a); err != nil {
		t.Fatal(err)
	}
	if err := there.Export(ctx, dsec.LayerRef(top.Digest), &b); err != nil || !bytes.Equal(a.Bytes(), b.Bytes()) {
		t.Errorf("another archive, %v", err)
	}
	if left, err := os.ReadDir(there.path("tmp")); err != nil || len(left) > 0 {
		t.Errorf("left %v, %v", left, err)
	}
	// A chunk that is said to be here and is not what it was.
	l := set.Layers[0]
	f, err := os.OpenFile(there.path("layers", l.Digest.Hex(), layer.PresentFile), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	m, err := there.manifest(l.Digest)
	if err != nil {
		t.Fatal(err)
	}
	p, err := layer.OpenPresence(f, int(m.Data.Count))
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	p.Set(0)
	if err := there.Verify(ctx, dsec.LayerRef(l.Digest)); dsec.ClassOf(err) != dsec.Corrupt {
		t.Errorf("a hole that is said to be data: %v", err)
	}
}

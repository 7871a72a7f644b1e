package store

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/image"
	"github.com/opendsec/dsec/layer"
)

// TestLookWhileOpen: a store that is open is verified by somebody else, whole
// layers and such as are here in part.
func TestLookWhileOpen(t *testing.T) {
	ctx, blobs := context.Background(), openBucket(t, t.TempDir())
	one := openStore(t, t.TempDir(), Options{Blobs: blobs})
	info, err := one.Import(ctx, tree(t, map[string]string{"a": varied()}), "tag", image.Options{})
	if err != nil {
		t.Fatal(err)
	}
	two := openStore(t, t.TempDir(), Options{Blobs: blobs, OnDemand: true, Small: 1})
	if _, err := two.Acquire(ctx, "sb", []dsec.LayerRef{dsec.LayerRef(info.Digest)}); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		s     *Store
		whole bool
	}{{one, true}, {two, false}} {
		v, err := Look(c.s.dir)
		if err != nil {
			t.Fatal(err)
		}
		if all, err := v.Layers(); err != nil || len(all) != 1 || all[0] != info.Digest {
			t.Errorf("%v %v", all, err)
		}
		got, err := v.Verify(ctx, info.Digest)
		if err != nil || got.Of == 0 || (got.Chunks == got.Of) != c.whole {
			t.Errorf("%+v %v", got, err)
		}
	}
	v, err := Look(one.dir)
	if err != nil {
		t.Fatal(err)
	}
	if d, err := v.Resolve("tag"); err != nil || d != info.Digest {
		t.Errorf("%v %v", d, err)
	}
	for _, name := range []string{layer.MetaFile, layer.DataFile, layer.TableFile} {
		path := filepath.Join(one.path("layers", info.Digest.Hex()), name)
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, flip(b, 10), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := v.Verify(ctx, info.Digest); !errors.Is(err, dsec.Corrupt.Err()) {
			t.Errorf("%s: %v", name, err)
		}
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := v.Verify(ctx, layer.DigestOf([]byte("x"))); !errors.Is(err, dsec.NotFound.Err()) {
		t.Errorf("unknown: %v", err)
	}
}

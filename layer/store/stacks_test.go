package store

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/image"
	"github.com/opendsec/dsec/layer"
)

// layersOf makes layers with a file each, that stand on others.
func layersOf(t testing.TB, s *Store, names ...string) (parts []layer.Part) {
	t.Helper()
	for _, n := range names {
		info, err := s.Import(context.Background(), tree(t, map[string]string{n: n, "top": n}), n+":1", image.Options{KeepWhiteouts: true})
		if err != nil {
			t.Fatal(err)
		}
		parts = append(parts, layer.Part{Digest: info.Digest})
	}
	return parts
}

func TestAStackStandsForItsLayers(t *testing.T) {
	ctx, dir := context.Background(), t.TempDir()
	s := openStore(t, dir, Options{Grace: time.Nanosecond})
	parts := layersOf(t, s, "a", "b", "c")
	st := layer.Stack{Layers: parts[:2], Config: &image.Config{Workdir: "/w"}}
	info, err := s.PutStack(ctx, st, "somewhere", "img:1")
	if err != nil {
		t.Fatal(err)
	}
	for _, tag := range []string{"a:1", "b:1", "c:1"} {
		if err := s.Untag(ctx, tag); err != nil {
			t.Fatal(err)
		}
	}
	// b is in the stack and again above: it counts there.
	set, err := s.Acquire(ctx, "sb", []dsec.LayerRef{"img:1", dsec.LayerRef(parts[2].Digest), dsec.LayerRef(parts[1].Digest)})
	if err != nil {
		t.Fatal(err)
	}
	if got, want := stacked(t, set), "a=a b=b c=c top=b"; got != want || len(set.Layers) != 3 || set.Config.Workdir != "/w" {
		t.Errorf("%s of %d layers, config %+v; want %s", got, len(set.Layers), set.Config, want)
	}
	e, err := s.Inspect(ctx, "img:1")
	if err != nil || e.Digest != info.Digest || e.DataSize == 0 || e.Entries != 6 || !slices.Equal(e.Layers, parts[:2]) {
		t.Errorf("%+v, %v", e, err)
	}
	if err := s.Verify(ctx, "img:1"); err != nil {
		t.Error(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = openStore(t, dir, Options{Grace: time.Nanosecond})
	again, err := s.Acquire(ctx, "sb", []dsec.LayerRef{"img:1", dsec.LayerRef(parts[2].Digest), dsec.LayerRef(parts[1].Digest)})
	if err != nil || len(again.Layers) != 3 || again.Config.Workdir != "/w" {
		t.Errorf("the same lease: %+v, %v", again, err)
	}
	collects(t, s, 0)
	if err := s.Release(ctx, "sb"); err != nil {
		t.Fatal(err)
	}
	collects(t, s, 1) // c; the tag keeps the stack, and that a and b
	if err := s.Remove(ctx, dsec.LayerRef(parts[0].Digest)); !errors.Is(err, dsec.IllegalState.Err()) {
		t.Errorf("remove of a layer of a stack: %v", err)
	}
	if err := s.Untag(ctx, "img:1"); err != nil {
		t.Fatal(err)
	}
	collects(t, s, 3)
}

// collects says dry what goes, and then it goes.
func collects(t testing.TB, s *Store, n int) {
	t.Helper()
	for _, dry := range []bool{true, false} {
		gone, err := s.Collect(context.Background(), dry)
		if err != nil || len(gone) != n {
			t.Errorf("dry %t: %d went, want %d: %v", dry, len(gone), n, err)
		}
	}
}

func TestAStackTravelsThroughTheBlobStore(t *testing.T) {
	ctx, blobs := context.Background(), openBucket(t, t.TempDir())
	one := openStore(t, t.TempDir(), Options{Blobs: blobs})
	info, err := one.PutStack(ctx, layer.Stack{Layers: layersOf(t, one, "a", "b")}, "", "")
	if err != nil {
		t.Fatal(err)
	}
	two := openStore(t, t.TempDir(), Options{Blobs: blobs})
	set, err := two.Acquire(ctx, "sb", []dsec.LayerRef{dsec.LayerRef(info.Digest)})
	if err != nil || len(set.Layers) != 2 {
		t.Fatalf("%+v, %v", set, err)
	}
	if _, err := two.Acquire(ctx, "other", []dsec.LayerRef{dsec.LayerRef(layer.DigestOf([]byte("none")))}); !errors.Is(err, dsec.NotFound.Err()) {
		t.Errorf("a digest that is nowhere: %v", err)
	}
}

func TestStacksThatCannotBe(t *testing.T) {
	ctx := context.Background()
	s := openStore(t, t.TempDir(), Options{})
	parts := layersOf(t, s, "a", "b")
	for what, st := range map[string]layer.Stack{
		"empty":    {},
		"twice":    {Layers: []layer.Part{parts[0], parts[0]}},
		"not here": {Layers: []layer.Part{{Digest: layer.DigestOf([]byte("none"))}}},
	} {
		if _, err := s.PutStack(ctx, st, "", "x:1"); err == nil {
			t.Error(what)
		}
	}
	if _, err := s.PutStack(ctx, layer.Stack{Layers: parts}, "", "../x"); !errors.Is(err, dsec.Invalid.Err()) {
		t.Errorf("tag: %v", err)
	}
	// More in all than a sandbox can stand on.
	var refs []dsec.LayerRef
	for i := range layer.MaxStack + 1 {
		info, err := s.Import(ctx, tree(t, map[string]string{"f": fmt.Sprint(i)}), "", image.Options{KeepWhiteouts: true})
		if err != nil {
			t.Fatal(err)
		}
		refs = append(refs, dsec.LayerRef(info.Digest))
	}
	if _, err := s.Acquire(ctx, "sb", refs); !errors.Is(err, dsec.Invalid.Err()) {
		t.Errorf("%d layers: %v", len(refs), err)
	}
}

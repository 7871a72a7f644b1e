package node

import (
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob/bucket"
	"github.com/opendsec/dsec/image"
	"github.com/opendsec/dsec/image/erofs"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/layer/store"
)

// TestH8_AChainOfPackedDisksStaysShort packs, goes on from there, changes and
// packs, twenty times: what a sandbox is made of does not grow with it, and
// everything is there at the end.
func TestH8_AChainOfPackedDisksStaysShort(t *testing.T) {
	s, err := store.Open(t.TempDir(), store.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	w := newWorld(t, func(c *Config) { c.Store, c.Add = s, s.Add })
	tree := t.TempDir()
	if err := os.WriteFile(tree+"/base", []byte("base"), 0o644); err != nil {
		t.Fatal(err)
	}
	base, err := s.Import(t.Context(), "dir:"+tree, "base:1", image.Options{})
	if err != nil {
		t.Fatal(err)
	}
	from, longest := dsec.LayerRef("base:1"), 0
	var last dsec.Packed
	for i := range 20 {
		sb, err := w.Create(t.Context(), "p", dsec.Spec{Tier: dsec.TierContainer, Image: from})
		if err != nil {
			t.Fatal(i, err)
		}
		if len(sb.Digests) == 0 || sb.Digests[0] != string(base.Digest) {
			t.Fatalf("made of %v", sb.Digests)
		}
		longest = max(longest, len(sb.Digests)-1)
		w.run(sb.ID, fmt.Sprintf("echo %d > /root/f%d", i, i))
		if last, err = w.Commit(t.Context(), sb.ID, layer.Tag{Name: "chain:1", Project: "p"}, dsec.Scrub{}, ""); err != nil {
			t.Fatal(i, err)
		}
		if last.Lineage.Parents[0] != string(base.Digest) || last.Lineage.Sandbox != sb.ID {
			t.Errorf("%d: %+v", i, last.Lineage)
		}
		if m := last.Lineage.Merged; len(m) > 0 && (len(last.Lineage.Parents) != 1 || !slices.Equal(append(last.Lineage.Parents[:1:1], m...), sb.Digests)) {
			t.Errorf("%d: merged %v of %v", i, m, sb.Digests)
		}
		from = "chain:1"
		if i%5 == 0 {
			from = dsec.LayerRef(last.Digest) // by digest as well
		}
		if _, err := w.Delete(t.Context(), sb.ID, ""); err != nil {
			t.Fatal(err)
		}
	}
	if longest != maxPacked {
		t.Errorf("%d packed layers in one sandbox, want at most and once %d", longest, maxPacked)
	}
	set, err := s.Acquire(t.Context(), "look", []dsec.LayerRef{"chain:1"})
	if err != nil {
		t.Fatal(err)
	}
	have := map[string]bool{}
	for _, l := range set.Layers {
		f, err := os.Open(l.Meta)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		im, err := erofs.Open(f, l.MetaSize, nil)
		if err != nil {
			t.Fatal(err)
		}
		if err := im.Walk(func(name string, _ *erofs.Node) error {
			have[name] = true
			return nil
		}); err != nil {
			t.Fatal(err)
		}
	}
	for i := range 20 {
		if !have[fmt.Sprintf("root/f%d", i)] {
			t.Errorf("root/f%d is gone", i)
		}
	}
	leases, err := s.Leases(t.Context())
	if err != nil || slices.ContainsFunc(leases, func(l string) bool { return strings.HasSuffix(l, packSuffix) }) {
		t.Errorf("leases %v %v", leases, err)
	}
}

// TestAChainWhoseDataAreElsewhereIsMerged: the layers were packed on another
// machine, and here their data files have holes.
func TestAChainWhoseDataAreElsewhereIsMerged(t *testing.T) {
	blobs, err := bucket.Open(t.Context(), "file://"+t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer blobs.Close()
	tree := t.TempDir()
	if err := os.WriteFile(tree+"/base", []byte("base"), 0o644); err != nil {
		t.Fatal(err)
	}
	var last dsec.Packed
	next := func(w *world, from dsec.LayerRef, i int) {
		sb, err := w.Create(t.Context(), "p", dsec.Spec{Tier: dsec.TierContainer, Image: from})
		if err != nil {
			t.Fatal(i, err)
		}
		w.run(sb.ID, fmt.Sprintf("echo %d > /root/f%d", i, i))
		if last, err = w.Commit(t.Context(), sb.ID, layer.Tag{}, dsec.Scrub{}, ""); err != nil {
			t.Fatal(i, err)
		}
	}
	here, err := store.Open(t.TempDir(), store.Options{Blobs: blobs})
	if err != nil {
		t.Fatal(err)
	}
	defer here.Close()
	if _, err := here.Import(t.Context(), "dir:"+tree, "base:1", image.Options{}); err != nil {
		t.Fatal(err)
	}
	w := newWorld(t, func(c *Config) { c.Store, c.Add = here, here.Add })
	from := dsec.LayerRef("base:1")
	for i := range maxPacked {
		next(w, from, i)
		from = dsec.LayerRef(last.Digest)
	}
	there, err := store.Open(t.TempDir(), store.Options{Blobs: blobs, OnDemand: true, Small: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer there.Close()
	next(newWorld(t, func(c *Config) { c.Store, c.Add = there, there.Add }), from, maxPacked)
	if len(last.Lineage.Merged) != maxPacked {
		t.Fatalf("merged %v", last.Lineage.Merged)
	}
	set, err := there.Acquire(t.Context(), "look", []dsec.LayerRef{dsec.LayerRef(last.Digest)})
	if err != nil {
		t.Fatal(err)
	}
	if whole, err := set.Layers[0].Whole(); err != nil || whole {
		t.Errorf("the base is whole, %v: the test tests nothing", err)
	}
	top := set.Layers[len(set.Layers)-1]
	data, err := there.OpenData(t.Context(), top)
	if err != nil {
		t.Fatal(err)
	}
	defer data.Close()
	all, err := io.ReadAll(io.NewSectionReader(data, 0, top.DataSize))
	if err != nil {
		t.Fatal(err)
	}
	for i := range maxPacked + 1 {
		if !slices.Contains(strings.FieldsFunc(string(all), func(r rune) bool { return r == 0 }), fmt.Sprintf("%d\n", i)) {
			t.Errorf("what sandbox %d wrote is not in the merged layer", i)
		}
	}
}

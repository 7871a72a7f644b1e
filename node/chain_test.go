package node

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/opendsec/dsec"
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

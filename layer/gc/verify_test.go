package gc_test

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/layer/gc"
)

func verify(t *testing.T, dir string) gc.Checked {
	t.Helper()
	last, total := int64(0), int64(0)
	c, err := gc.Verify(context.Background(), openBucket(t, dir), gc.VerifyOptions{Dir: t.TempDir(), Progress: func(d, n int64) { last, total = max(last, d), n }})
	if err != nil {
		t.Fatal(err)
	}
	if last != total || last == 0 {
		t.Errorf("progress ended at %d of %d", last, total)
	}
	return c
}

// TestVerifyFindsEveryDamage: a flipped bit, a missing end and a missing object of
// each kind are found, with exactly the layers that they hit.
func TestVerifyFindsEveryDamage(t *testing.T) {
	ctx, dir := context.Background(), t.TempDir()
	blobs := openBucket(t, dir)
	s := openNode(t, t.TempDir(), blobs)
	one, err := importTree(ctx, s, tree(t, 1, 1, 2, 3), "one")
	if err != nil {
		t.Fatal(err)
	}
	two, err := importTree(ctx, s, tree(t, 2, 2, 3, 4), "two")
	if err != nil {
		t.Fatal(err)
	}
	good := verify(t, dir)
	if len(good.Damaged) > 0 || good.Layers != 2 || good.Chunks < 8 {
		t.Fatalf("%+v", good)
	}
	hits := map[layer.Digest]int{}
	for _, kind := range layer.Kinds {
		for _, key := range keys(t, blobs, string(kind)+"/") {
			path := filepath.Join(dir, key)
			was, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			flipped := bytes.Clone(was)
			flipped[len(was)/2] ^= 0x10
			for name, bad := range map[string][]byte{"flipped": flipped, "cut": was[:len(was)-1], "empty": {}} {
				if err := os.WriteFile(path, bad, 0o600); err != nil {
					t.Fatal(err)
				}
				c := verify(t, dir)
				if len(c.Damaged) == 0 || !slices.ContainsFunc(c.Damaged, func(d gc.Damage) bool { return d.Key == key }) {
					t.Errorf("%s %s: %+v", name, key, c.Damaged)
				}
				for _, d := range c.Hit() {
					hits[d]++
				}
				if len(c.Hit()) == 0 {
					t.Errorf("%s %s: hits no layer", name, key)
				}
			}
			if err := os.Remove(path); err != nil {
				t.Fatal(err)
			}
			c := verify(t, dir)
			if kind != layer.KindManifest && (len(c.Damaged) != 1 || c.Damaged[0].Key != key || !strings.Contains(c.Damaged[0].Error, "not there")) {
				t.Errorf("missing %s: %+v", key, c.Damaged)
			}
			if err := os.WriteFile(path, was, 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	if hits[one] == 0 || hits[two] == 0 || hits[one] == hits[two] { // two lies partly in a pack of one
		t.Errorf("hits: %v", hits)
	}
}

// TestVerifyFindsWrongPlaces: an index whose table is right and whose places are
// not is damaged, and the pack is not.
func TestVerifyFindsWrongPlaces(t *testing.T) {
	ctx, dir := context.Background(), t.TempDir()
	blobs := openBucket(t, dir)
	d, err := importTree(ctx, openNode(t, t.TempDir(), blobs), tree(t, 1, 1, 2, 3), "one")
	if err != nil {
		t.Fatal(err)
	}
	key := keys(t, blobs, "indexes/")[0]
	raw, err := os.ReadFile(filepath.Join(dir, key))
	if err != nil {
		t.Fatal(err)
	}
	raw[len(raw)-8] ^= 1 // the lowest byte of the last offset
	if err := os.WriteFile(filepath.Join(dir, key), raw, 0o600); err != nil {
		t.Fatal(err)
	}
	c := verify(t, dir)
	if len(c.Damaged) != 1 || c.Damaged[0].Key != key || !slices.Equal(c.Hit(), []layer.Digest{d}) {
		t.Errorf("%+v", c.Damaged)
	}
}

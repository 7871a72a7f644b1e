package store

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob/bucket"
	"github.com/opendsec/dsec/image"
	"github.com/opendsec/dsec/image/erofs"
	"github.com/opendsec/dsec/layer"
)

// oneFile writes a layer of one small file.
func oneFile(name string, l dsec.Lineage) func(image.Files) (dsec.Lineage, error) {
	return func(f image.Files) (dsec.Lineage, error) {
		data := erofs.NewData(f.Data)
		runs, err := data.Append(strings.NewReader(name), int64(len(name)))
		if err != nil {
			return l, err
		}
		root := erofs.NewDir(0o755)
		err = root.Link(name, &erofs.Inode{Mode: erofs.TypeRegular | 0o644, Size: int64(len(name)), Runs: runs})
		if err == nil {
			_, err = erofs.Write(f.Meta, root, data.Blocks())
		}
		return l, err
	}
}

func TestAPackedLayerKeepsItsLineageAndItsParents(t *testing.T) {
	s, ctx := openStore(t, t.TempDir(), Options{Grace: time.Nanosecond}), t.Context()
	base, err := s.Import(ctx, tree(t, map[string]string{"a": "base"}), "", image.Options{})
	if err != nil {
		t.Fatal(err)
	}
	id := dsec.NewSandboxID("n")
	l := dsec.Lineage{Version: 1, Parents: []string{string(base.Digest)}, Sandbox: id, Time: time.Now().UTC(), Scrub: "sha256:x"}
	made, err := s.Add(ctx, layer.New{Source: "packed", Config: &image.Config{User: "u"}, Tag: layer.Tag{Name: "mine:1", Project: "p"}}, oneFile("f", l))
	if err != nil {
		t.Fatal(err)
	}
	got, err := s.View("p").Inspect(ctx, "mine:1")
	if err != nil || got.Digest != made.Digest || got.Lineage == nil || got.Lineage.Sandbox != id || got.Lineage.Scrub != "sha256:x" || got.Image {
		t.Fatalf("%+v %v", got, err)
	}
	if _, err := s.View("q").Inspect(ctx, "mine:1"); dsec.ClassOf(err) != dsec.NotFound {
		t.Errorf("another project: %v", err)
	}
	// At the bottom it stands for both, above only for itself.
	other := dsec.LayerRef(imported(t, s, map[string]string{"b": "other"}))
	for want, refs := range map[string][]dsec.LayerRef{
		"base made": {"mine:1"}, "base": {dsec.LayerRef(base.Digest)}, "base made other": {"mine:1", other}, "other made": {other, "mine:1"},
		"made base": {"mine:1", dsec.LayerRef(base.Digest)}} {
		set, err := s.View("p").Acquire(ctx, "l", refs)
		if got := named(set, map[string]layer.Digest{"base": base.Digest, "made": made.Digest, "other": layer.Digest(other)}); err != nil || got != want {
			t.Errorf("%v: %s, want %s, %v", refs, got, want, err)
		}
		if err := s.Release(ctx, "l"); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Remove(ctx, other); err != nil {
		t.Fatal(err)
	}
	// What a kept layer stands on is kept.
	if gone, err := s.Collect(ctx, false); err != nil || len(gone) != 0 {
		t.Errorf("collected %v %v", gone, err)
	}
	if err := s.Remove(ctx, dsec.LayerRef(base.Digest)); dsec.ClassOf(err) != dsec.IllegalState || !strings.Contains(err.Error(), string(made.Digest)) {
		t.Errorf("remove a parent: %v", err)
	}
	if err := s.Untag(ctx, "mine:1"); err != nil {
		t.Fatal(err)
	}
	if gone, err := s.Collect(ctx, false); err != nil || len(gone) != 2 {
		t.Errorf("collected %v %v", gone, err)
	}
}

func TestATagGoesWhenItsTimeIsOver(t *testing.T) {
	s, ctx := openStore(t, t.TempDir(), Options{Grace: time.Nanosecond}), t.Context()
	for name, until := range map[string]time.Time{"over:1": time.Now().Add(-time.Minute), "later:1": time.Now().Add(time.Hour), "never:1": {}} {
		if _, err := s.Add(ctx, layer.New{Tag: layer.Tag{Name: name, Project: "p", Expires: until}}, oneFile(name, dsec.Lineage{})); err != nil {
			t.Fatal(err)
		}
	}
	if gone, err := s.Collect(ctx, true); err != nil || len(gone) != 0 {
		t.Errorf("a dry run would remove %v %v", gone, err)
	}
	if _, err := s.Collect(ctx, false); err != nil {
		t.Fatal(err)
	}
	tags, err := s.Tags(ctx)
	if err != nil || len(tags) != 2 || tags["later:1"] == "" || tags["never:1"] == "" {
		t.Errorf("left %v %v", tags, err)
	}
	// Another that opens the store reads the same.
	dir := s.dir
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	again := openStore(t, dir, Options{})
	again.mu.Lock()
	defer again.mu.Unlock()
	if l, err := again.readTagLocked("later:1"); err != nil || l.project != "p" || time.Until(l.expires) < 50*time.Minute {
		t.Errorf("%+v %v", l, err)
	}
}

func TestAnAddThatFailsLeavesNothing(t *testing.T) {
	s, ctx := openStore(t, t.TempDir(), Options{}), t.Context()
	cause := dsec.E(dsec.NoSpace, "pack", "", errors.New("full"))
	_, err := s.Add(ctx, layer.New{}, func(image.Files) (dsec.Lineage, error) { return dsec.Lineage{}, cause })
	if dsec.ClassOf(err) != dsec.NoSpace {
		t.Error(err)
	}
	_, err = s.Add(ctx, layer.New{}, func(f image.Files) (dsec.Lineage, error) {
		_, err := f.Meta.WriteString("not a layer")
		return dsec.Lineage{}, err
	})
	if dsec.ClassOf(err) != dsec.Corrupt {
		t.Error(err)
	}
	cctx, cancel := context.WithCancel(ctx)
	_, err = s.Add(cctx, layer.New{}, func(f image.Files) (dsec.Lineage, error) {
		cancel()
		return oneFile("f", dsec.Lineage{})(f)
	})
	if dsec.ClassOf(err) != dsec.Canceled {
		t.Error(err)
	}
	for _, d := range []string{"tmp", "layers"} {
		if left, err := os.ReadDir(s.path(d)); err != nil || len(left) > 0 {
			t.Errorf("%s holds %v %v", d, left, err)
		}
	}
}

func TestLineageTravelsWithTheLayer(t *testing.T) {
	b, err := bucket.Open(t.Context(), "file://"+t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	here := openStore(t, t.TempDir(), Options{Blobs: b})
	base, err := here.Import(t.Context(), tree(t, map[string]string{"a": "base"}), "", image.Options{})
	if err != nil {
		t.Fatal(err)
	}
	info, err := here.Add(t.Context(), layer.New{}, oneFile("f", dsec.Lineage{Version: 1, Parents: []string{string(base.Digest)}, Sandbox: "sb"}))
	if err != nil {
		t.Fatal(err)
	}
	there := openStore(t, t.TempDir(), Options{Blobs: b})
	set, err := there.Acquire(t.Context(), "l", []dsec.LayerRef{dsec.LayerRef(info.Digest)})
	if err != nil || len(set.Layers) != 2 || set.Layers[0].Digest != base.Digest || set.Layers[1].Lineage.Sandbox != "sb" {
		t.Fatal(set, err)
	}
	// Of other bytes the lineage says where those were packed; who has the lease keeps what he has.
	if _, err := there.Add(t.Context(), layer.New{}, oneFile("f", dsec.Lineage{Version: 1, Parents: []string{string(info.Digest)}})); err != nil {
		t.Fatal(err)
	}
	again, err := there.Acquire(t.Context(), "l", []dsec.LayerRef{dsec.LayerRef(info.Digest)})
	if err != nil || len(again.Layers) != 2 || again.Layers[0].Digest != base.Digest {
		t.Fatal(again, err)
	}
}

func imported(t *testing.T, s *Store, files map[string]string) layer.Digest {
	t.Helper()
	info, err := s.Import(t.Context(), tree(t, files), "", image.Options{})
	if err != nil {
		t.Fatal(err)
	}
	return info.Digest
}

// named writes a set with names.
func named(set layer.Set, names map[string]layer.Digest) string {
	var out []string
	for _, l := range set.Layers {
		for name, d := range names {
			if d == l.Digest {
				out = append(out, name)
			}
		}
	}
	return strings.Join(out, " ")
}

// TestAStackOfAPackedLayerHasWhatItStandsOn: templates and archives too are made
// of all, on a machine that has to fetch more layers than races are borne.
func TestAStackOfAPackedLayerHasWhatItStandsOn(t *testing.T) {
	b, err := bucket.Open(t.Context(), "file://"+t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	here, ctx := openStore(t, t.TempDir(), Options{Blobs: b, Grace: time.Nanosecond}), t.Context()
	stands := []string{string(imported(t, here, map[string]string{"a": "base"}))}
	for i := range maxRaces + 2 {
		info, err := here.Add(ctx, layer.New{Tag: layer.Tag{Name: "chain:1"}}, oneFile(fmt.Sprint("f", i), dsec.Lineage{Version: 1, Parents: slices.Clone(stands)}))
		if err != nil {
			t.Fatal(err)
		}
		stands = append(stands, string(info.Digest))
	}
	tool := imported(t, here, map[string]string{"tool": "x"})
	if err := here.Tag(ctx, "tool:1", tool); err != nil {
		t.Fatal(err)
	}
	made, err := here.Bind(ctx, "template:1", Template{Image: "chain:1", Toolkits: []dsec.LayerRef{"tool:1"}})
	if err != nil || len(made.Layers) != len(stands)+1 {
		t.Fatal(made, err)
	}
	for i, p := range made.Layers {
		want := layer.Part{Digest: tool, Role: layer.RoleToolkit, Ref: "tool:1"}
		if i < len(stands) {
			want = layer.Part{Digest: layer.Digest(stands[i]), Role: layer.RoleBase, Ref: "chain:1"}
		}
		if p != want {
			t.Errorf("%d: %+v, want %+v", i, p, want)
		}
	}
	var archive bytes.Buffer
	if err := here.Export(ctx, "chain:1", &archive); err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(archive.String(), "sha256/"); n < len(stands) {
		t.Errorf("%d blobs in the archive of %d layers", n, len(stands))
	}
	// The stack keeps them all, without the tag of the packed layer.
	if err := errors.Join(here.Untag(ctx, "chain:1"), here.Untag(ctx, "tool:1")); err != nil {
		t.Fatal(err)
	}
	if gone, err := here.Collect(ctx, false); err != nil || len(gone) > 0 {
		t.Errorf("collected %v %v", gone, err)
	}
	there := openStore(t, t.TempDir(), Options{Blobs: b})
	for lease, ref := range map[string]string{"stack": string(made.Digest), "packed": stands[len(stands)-1]} {
		set, err := there.Acquire(ctx, lease, []dsec.LayerRef{dsec.LayerRef(ref)})
		if err != nil || len(set.Layers) < len(stands) || string(set.Layers[0].Digest) != stands[0] {
			t.Errorf("%s: %d layers, %v", lease, len(set.Layers), err)
		}
	}
}

func FuzzDecodeTagged(f *testing.F) {
	d := layer.DigestOf(nil)
	f.Add([]byte(d + "\n"))
	f.Add([]byte(d + "\np\n"))
	f.Add([]byte(d + "\n\n2030-01-02T03:04:05Z\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		got, err := decodeTagged(b)
		if err != nil {
			return
		}
		again, err := decodeTagged(got.encode())
		if err != nil || again.digest != got.digest || again.project != got.project || !again.expires.Equal(got.expires) {
			t.Fatalf("%+v became %+v, %v", got, again, err)
		}
	})
}

package daemon

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/image"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/layer/store"
	"github.com/opendsec/dsec/node/nodeapi"
)

// TestRepackedByItsTrace: what was recorded of a layer is shown, and lays out the
// layer that the tag then means.
func TestRepackedByItsTrace(t *testing.T) {
	ctx, dir := t.Context(), t.TempDir()
	s, err := store.Open(filepath.Join(dir, "store"), store.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	tree := filepath.Join(dir, "tree")
	if err := os.Mkdir(tree, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"a", "b", "c"} {
		if err := os.WriteFile(filepath.Join(tree, name), bytes.Repeat([]byte(name), 5000), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	info, err := s.Import(ctx, tree, "base:1", image.Options{})
	if err != nil {
		t.Fatal(err)
	}
	l := &layers{store: s}
	said := 0
	progress := func(nodeapi.Progress) { said++ }
	if _, err := l.Trace(ctx, "base:1"); dsec.ClassOf(err) != dsec.NotFound {
		t.Errorf("trace of what nobody read: %v", err)
	}
	if _, err := l.Repack(ctx, nodeapi.Repack{Ref: "base:1", Tag: "base:1"}, progress); dsec.ClassOf(err) != dsec.NotFound {
		t.Errorf("repack of what nobody read: %v", err)
	}
	if err := s.RecordTrace(ctx, info.Digest, store.Recording{Window: time.Second, Ordered: true, Ranges: []layer.Range{{Off: 16 << 10, Len: 8 << 10}}}); err != nil {
		t.Fatal(err)
	}
	tr, err := l.Trace(ctx, "base:1")
	if err != nil || tr.DataSize != 24<<10 || len(tr.Files) != 1 || tr.Files[0].Path != "c" {
		t.Fatalf("%+v, %v", tr, err)
	}
	made, err := l.Repack(ctx, nodeapi.Repack{Ref: "base:1", Tag: "base:1"}, progress)
	if err != nil || made.Digest == info.Digest || made.Tags[0] != "base:1" || made.Source != store.RepackedFrom+string(info.Digest) || said == 0 {
		t.Fatalf("%+v, %v, %d times told", made, err, said)
	}
	if tr, err = l.Trace(ctx, "base:1"); err != nil || tr.Layer != made.Digest || tr.Pieces[0].Block != 0 || tr.Files[0].Path != "c" {
		t.Errorf("%+v, %v", tr, err)
	}
}

func TestOwnersThatNobodyIs(t *testing.T) {
	for s, ok := range map[string]bool{"0": true, "1000:100": true, "4294967294": true, "4294967295": false, "0:4294967295": false, "4294967296": false, "-1": false, "a": false} {
		if o, err := parseOwner(s); (err == nil) != ok || !ok && dsec.ClassOf(err) != dsec.Invalid {
			t.Errorf("%s: %+v, %v", s, o, err)
		}
	}
}

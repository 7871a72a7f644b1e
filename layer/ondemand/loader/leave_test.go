package loader

import (
	"bytes"
	"context"
	"os"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/layer"
)

// TestTheFileThatIsMarkedIsTheOneThatIsThere: a layer that was removed or evicted
// behind the loader's back and came again has another data file. The kernel has to
// ask for that one, or its holes would be read.
func TestTheFileThatIsMarkedIsTheOneThatIsThere(t *testing.T) {
	w := newWorld(t, PreContent)
	ctx, d := t.Context(), w.layer.Digest
	must(t, w.store.Release(ctx, "sb"))
	defer w.serve()()
	w.eventually("the loader answers", func() bool { c, err := w.client.Counts(ctx); return err == nil && c.PID == os.Getpid() })
	kept := func() []string {
		names, err := w.shelf.Names(ctx, prefix+d.Hex())
		must(t, err)
		return names
	}
	for range 3 {
		if _, err := w.store.Evict(ctx, dsec.LayerRef(d), func(context.Context, layer.Digest) error { return nil }); err != nil {
			t.Fatal(err)
		}
		for range 2 { // the second time it is marked
			if d, err := w.client.Device(ctx, w.layer); err != nil || d.Kind != PreContent {
				t.Fatal(d, err)
			}
		}
		names := kept()
		if len(names) != 1 {
			t.Fatalf("kept: %v", names)
		}
		is, err := os.Stat(w.layer.Data)
		must(t, err)
		f, err := w.shelf.Get(ctx, names[0])
		must(t, err)
		if was, err := f.Stat(); err != nil || !os.SameFile(was, is) {
			t.Errorf("another file is marked, %v", err)
		}
		must(t, f.Close())
	}
	// What the loader brings comes into the file that is there.
	must(t, w.client.Fetch(ctx, d, nil))
	if here, of, err := w.store.Here(d); err != nil || here != of {
		t.Errorf("%d of %d chunks are here, %v", here, of, err)
	}
	must(t, w.client.Leave(ctx, d))
	status, err := w.client.Status(ctx)
	if names := kept(); err != nil || len(status) > 0 || len(names) > 0 {
		t.Errorf("after it was left: %v, %+v, %v", names, status, err)
	}
	if got, err := os.ReadFile(w.layer.Data); err != nil || !bytes.Contains(got, w.noise[:4096]) {
		t.Errorf("other bytes, %v", err)
	}
}

package store

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/image"
	"github.com/opendsec/dsec/layer"
)

func recording(first int64) Recording {
	return Recording{Window: time.Second, Ordered: true, Ranges: []layer.Range{{Off: first << 12, Len: 4096}, {Off: 0, Len: 4096}}}
}

// TestTraceIsMergedOverMachines: what one machine records another adds to, and a
// third that never had the layer reads.
func TestTraceIsMergedOverMachines(t *testing.T) {
	ctx, dir := context.Background(), t.TempDir()
	blobs := openBucket(t, dir)
	one := openStore(t, t.TempDir(), Options{Blobs: blobs})
	two := openStore(t, t.TempDir(), Options{Blobs: blobs})
	info, err := one.Import(ctx, tree(t, map[string]string{"a": varied()}), "", image.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := one.Trace(ctx, info.Digest); !errors.Is(err, dsec.NotFound.Err()) {
		t.Errorf("before any: %v", err)
	}
	if err := two.RecordTrace(ctx, info.Digest, recording(3)); !errors.Is(err, dsec.NotFound.Err()) {
		t.Errorf("of a layer that is not here: %v", err)
	}
	if _, err := two.Acquire(ctx, "sb", []dsec.LayerRef{dsec.LayerRef(info.Digest)}); err != nil {
		t.Fatal(err)
	}
	for i, s := range []*Store{one, two, one} {
		if err := s.RecordTrace(ctx, info.Digest, recording(int64(i)+3)); err != nil {
			t.Fatal(err)
		}
	}
	three := openStore(t, t.TempDir(), Options{Blobs: blobs})
	got, err := three.Trace(ctx, info.Digest)
	if err != nil || got.Recordings != 3 || len(got.Pieces) != 4 || got.Pieces[3].Count != 3 {
		t.Errorf("%+v, %v", got, err)
	}
	// The layer may be collected and come back, and a trace that is rubbish is none.
	if err := os.WriteFile(filepath.Join(dir, layer.TraceKey(info.Digest)), []byte("rubbish"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := one.RecordTrace(ctx, info.Digest, recording(9)); err != nil {
		t.Fatal(err)
	}
	if got, err = three.Trace(ctx, info.Digest); err != nil || got.Recordings != 4 {
		t.Errorf("after rubbish: %+v, %v", got, err)
	}
	if err := one.Verify(ctx, dsec.LayerRef(info.Digest)); err != nil {
		t.Error(err)
	}
}

func TestConcurrentRecordingsOfAProcessAllCount(t *testing.T) {
	ctx := context.Background()
	s := openStore(t, t.TempDir(), Options{Blobs: openBucket(t, t.TempDir())})
	info, err := s.Import(ctx, tree(t, map[string]string{"a": varied()}), "", image.Options{})
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for i := range 20 {
		wg.Go(func() {
			if err := s.RecordTrace(ctx, info.Digest, recording(int64(i))); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if got, err := s.Trace(ctx, info.Digest); err != nil || got.Recordings != 20 {
		t.Errorf("%d recordings, %v", got.Recordings, err)
	}
}

// TestTraceWithoutItsStore: a recording that cannot be put into the blob store
// is kept here, told as an error, and counts when the store is back.
func TestTraceWithoutItsStore(t *testing.T) {
	ctx, dir := context.Background(), t.TempDir()
	s := openStore(t, t.TempDir(), Options{Blobs: openBucket(t, dir)})
	info, err := s.Import(ctx, tree(t, map[string]string{"a": varied()}), "", image.Options{})
	if err != nil {
		t.Fatal(err)
	}
	// A directory where the object should be can neither be read nor written.
	far := filepath.Join(dir, layer.TraceKey(info.Digest))
	if err := os.MkdirAll(filepath.Join(far, "x"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := s.RecordTrace(ctx, info.Digest, recording(1)); err == nil {
		t.Error("no error")
	}
	if got := s.LocalTrace(info.Digest); got.Recordings != 1 {
		t.Errorf("kept: %+v", got)
	}
	if err := os.RemoveAll(far); err != nil {
		t.Fatal(err)
	}
	if err := s.RecordTrace(ctx, info.Digest, recording(1)); err != nil {
		t.Fatal(err)
	}
	if got, err := s.Trace(ctx, info.Digest); err != nil || got.Recordings != 2 {
		t.Errorf("%+v, %v", got, err)
	}
}

// TestResidentOfAMountIsRecorded: a whole layer raises no requests; what was read
// of it is found in memory.
func TestResidentOfAMountIsRecorded(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("mounting needs root: uid is", os.Geteuid())
	}
	ctx := context.Background()
	s := openStore(t, t.TempDir(), Options{})
	info, err := s.Import(ctx, mixed(t), "base:1", image.Options{})
	if err != nil {
		t.Fatal(err)
	}
	set, err := s.Acquire(ctx, "sb", []dsec.LayerRef{"base:1"})
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := unix.Mount(set.Layers[0].Meta, dir, "erofs", unix.MS_RDONLY|unix.MS_NODEV, "device="+set.Layers[0].Data); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error("unmount:", err)
		}
	}()
	root, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	if err := s.RecordResident(ctx, info.Digest, root, time.Second); err != nil {
		t.Error(err)
	}
	if tr := s.LocalTrace(info.Digest); tr.Recordings != 0 {
		t.Errorf("nothing was read: %+v", tr)
	}
	if _, err := os.ReadFile(filepath.Join(dir, "small/042")); err != nil {
		t.Fatal(err)
	}
	if err := s.RecordResident(ctx, info.Digest, root, time.Second); err != nil {
		t.Fatal(err)
	}
	tr, files, err := s.TracedFiles(ctx, "base:1")
	if err != nil || tr.Recordings != 1 || tr.Window != time.Second || len(files) != 1 || files[0].Path != "small/042" {
		t.Errorf("%+v %+v, %v", tr, files, err)
	}
}

package gc_test

import (
	"bytes"
	"context"
	"io"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/layer/gc"
	"github.com/opendsec/dsec/layer/store"
)

const ofProject = "p"

// momentFiles are a disk of 40 MiB that is nearly all hole, and a memory.
func momentFiles(t *testing.T) layer.MomentFiles {
	t.Helper()
	open := func(name string) *os.File {
		f, err := os.Create(filepath.Join(t.TempDir(), name))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = f.Close() })
		return f
	}
	f := layer.MomentFiles{Disk: open("disk"), Memory: open("memory")}
	_, err := f.Memory.Write(noise(1, 3<<20+77))
	for off, n := range map[int64]int{0: 8192, 9 << 20: 700 << 10, 31<<20 + 4096: 4096} {
		if err == nil {
			_, err = f.Disk.WriteAt(noise(n, n), off)
		}
	}
	if err == nil {
		err = f.Disk.Truncate(40<<20 + 12288)
	}
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func emptyFiles(t *testing.T) layer.MomentFiles {
	t.Helper()
	var f layer.MomentFiles
	for _, p := range []**os.File{&f.Disk, &f.Memory} {
		var err error
		if *p, err = os.CreateTemp(t.TempDir(), "empty"); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = (*p).Close() })
	}
	return f
}

func content(t *testing.T, f *os.File) []byte {
	t.Helper()
	b, err := io.ReadAll(io.NewSectionReader(f, 0, 1<<30))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func checkpointOf(project string) layer.Checkpoint {
	base := dsec.LayerRef(layer.DigestOf([]byte("base")))
	return layer.Checkpoint{Project: project, Sandbox: dsec.NewSandboxID("n"), Time: time.Now().UTC(), Machine: []byte("{}"),
		Spec: dsec.Spec{Tier: dsec.TierMicroVM, Image: base}}
}

// A checkpoint is kept for its time, whatever else is collected, comes to another node as it was, holes
// and all, and goes when its time is over.
func TestCheckpointsAreKeptForTheirTime(t *testing.T) {
	ctx, dir := context.Background(), t.TempDir()
	blobs := openBucket(t, dir)
	a, b := openNode(t, t.TempDir(), blobs), openNode(t, t.TempDir(), blobs)
	was := momentFiles(t)
	keep := func(until time.Time) layer.Digest {
		d, _, err := a.KeepCheckpoint(ctx, checkpointOf(ofProject), was, until)
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	over, d := keep(time.Now().Add(-time.Second)), keep(time.Now().Add(time.Hour))
	renew(t, a, b)
	for range 2 {
		collect(t, blobs)
	}
	for _, d := range []layer.Digest{over, d} { // the first is still in the root of its node
		if _, err := b.FindCheckpoint(ctx, ofProject, d); err != nil {
			t.Error(err)
		}
	}
	if _, err := a.Collect(ctx, false); err != nil {
		t.Fatal(err)
	}
	renew(t, a, b)
	for range 2 {
		collect(t, blobs)
	}
	if _, err := b.FindCheckpoint(ctx, ofProject, over); dsec.ClassOf(err) != dsec.NotFound {
		t.Errorf("its time is over: %v", err)
	}
	c, err := b.FindCheckpoint(ctx, ofProject, d)
	if err != nil {
		t.Fatal(err)
	}
	is := emptyFiles(t)
	if err := b.FetchCheckpoint(ctx, d, c, is); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(content(t, is.Disk), content(t, was.Disk)) || !bytes.Equal(content(t, is.Memory), content(t, was.Memory)) {
		t.Error("it is not what it was")
	}
	st, err := is.Disk.Stat()
	if err != nil {
		t.Fatal(err)
	}
	if used := st.Sys().(*syscall.Stat_t).Blocks * 512; used > 2<<20 {
		t.Errorf("a disk with less than 1 MiB in it takes %d bytes", used)
	}
	if _, err := b.FindCheckpoint(ctx, "another", d); dsec.ClassOf(err) != dsec.NotFound {
		t.Errorf("another project: %v", err)
	}
	if _, err := b.Acquire(ctx, "lease", []dsec.LayerRef{dsec.LayerRef(d)}); dsec.ClassOf(err) != dsec.NotFound {
		t.Errorf("a checkpoint leased as a layer: %v", err)
	}
}

// Verify says which checkpoints cannot be used for what is damaged, and a collector that cannot read a kept one
// removes nothing.
func TestDamagedCheckpoints(t *testing.T) {
	ctx, dir := context.Background(), t.TempDir()
	blobs := openBucket(t, dir)
	a := openNode(t, t.TempDir(), blobs)
	d, c, err := a.KeepCheckpoint(ctx, checkpointOf(ofProject), momentFiles(t), time.Now().Add(time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	renew(t, a)
	if checked, err := gc.Verify(ctx, blobs, gc.VerifyOptions{}); err != nil || len(checked.Damaged) > 0 {
		t.Fatalf("%+v %v", checked, err)
	}
	index := filepath.Join(dir, layer.IndexKey(c.Disk.Chunks))
	good, err := os.ReadFile(index)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(index, good[:len(good)-1], 0o600); err != nil {
		t.Fatal(err)
	}
	checked, err := gc.Verify(ctx, blobs, gc.VerifyOptions{})
	if err != nil || !slices.Contains(checked.Hit(), d) {
		t.Errorf("%+v %v", checked, err)
	}
	if err := os.WriteFile(index, good, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, layer.CheckpointKey(d)), []byte("{}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := gc.Collect(ctx, blobs, hasty(true)); dsec.ClassOf(err) != dsec.Corrupt {
		t.Errorf("collected beside a kept checkpoint that cannot be read: %v", err)
	}
}

func renew(t *testing.T, stores ...*store.Store) {
	t.Helper()
	for _, s := range stores {
		if err := s.Renew(context.Background()); err != nil {
			t.Fatal(err)
		}
	}
}

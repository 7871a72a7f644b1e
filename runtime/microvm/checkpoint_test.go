package microvm

import (
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob"
	"github.com/opendsec/dsec/blob/bucket"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/layer/store"
	"github.com/opendsec/dsec/process"
	"github.com/opendsec/dsec/runtime"
	"github.com/opendsec/dsec/runtime/microvm/vmm"
	"github.com/opendsec/dsec/runtime/runtimetest/layertest"
)

const checkpointProject = "p"

// shelf is an object storage in a directory.
type shelf struct {
	dir   string
	blobs blob.Store
}

func newShelf(t *testing.T) *shelf {
	t.Helper()
	dir := t.TempDir()
	b, err := bucket.Open(context.Background(), "file://"+dir)
	must(t, err)
	t.Cleanup(func() { _ = b.Close() })
	return &shelf{dir, b}
}

// node opens the layer store of one that has the storage.
func (s *shelf) node(t *testing.T) *store.Store {
	t.Helper()
	st, err := store.Open(t.TempDir(), store.Options{Blobs: s.blobs})
	must(t, err)
	t.Cleanup(func() { _ = st.Close() })
	return st
}

// files are those of a kind.
func (s *shelf) files(t *testing.T, kind string) []string {
	t.Helper()
	all, err := filepath.Glob(filepath.Join(s.dir, kind, "*"))
	must(t, err)
	if len(all) == 0 {
		t.Fatalf("no %s in the storage", kind)
	}
	return all
}

// checkpoint keeps one of a sandbox.
func (w *world) checkpoint(t *testing.T, st *store.Store, id dsec.SandboxID) layer.Digest {
	t.Helper()
	ctx := t.Context()
	must(t, w.r.KeepMoment(ctx, id, "kept"))
	m, err := w.r.OpenMoment(ctx, "kept")
	must(t, err)
	m.Spec.Image = dsec.LayerRef(kit.base.Digest)
	c := layer.Checkpoint{Project: checkpointProject, Sandbox: id, Time: time.Now().UTC(), Spec: m.Spec, Config: m.Config, Machine: m.Machine}
	d, _, err := st.KeepCheckpoint(ctx, c, m.Files, time.Now().Add(time.Hour))
	must(t, err)
	closeMoment(m.Files)
	must(t, w.r.DropMoment(ctx, "kept"))
	return d
}

// goOn makes a sandbox of a checkpoint.
func (w *world) goOn(ctx context.Context, st *store.Store, d layer.Digest, f ...func(*runtime.Request)) (dsec.SandboxID, error) {
	c, err := st.FindCheckpoint(ctx, checkpointProject, d)
	if err != nil {
		return "", err
	}
	r := request(f...)
	m := runtime.Moment{Spec: c.Spec, Config: c.Config, Machine: c.Machine, Disk: c.Disk.Size, Memory: c.Memory.Size}
	err = w.r.BringMoment(ctx, "brought", m, r.Layers.Layers, func(ctx context.Context, f layer.MomentFiles) error { return st.FetchCheckpoint(ctx, d, c, f) })
	if err != nil {
		return "", err
	}
	r.From = "brought"
	_, err = w.r.Create(ctx, r)
	return r.ID, errors.Join(err, w.r.DropMoment(ctx, "brought"))
}

const counts = "n=0; while n=$((n+1)); do echo $n; sleep 0.05; done"

// A process that counts and a file go on on another node, of which only the storage is the same, when the first
// is gone; the clock is right, and what has to differ does.
func TestCheckpointGoesOnOnAnotherNode(t *testing.T) {
	s := newShelf(t)
	a, b := newWorld(t, linked), newWorld(t, linked, apart)
	open := func(r *runtime.Request) { r.Spec.Network = dsec.NetworkOpen }
	id := a.create(t, open)
	a.run(t, id, "echo kept > /root/file")
	_, err := a.r.Exec(t.Context(), id, process.Spec{ID: "counter", Argv: []string{"/bin/sh", "-c", counts}})
	must(t, err)
	const tell = `hostname; cat /etc/machine-id /proc/sys/kernel/random/uuid; head -c 16 /dev/urandom | od -An -tx1`
	sa := s.node(t)
	d := a.checkpoint(t, sa, id)
	was := a.run(t, id, tell)
	last := lastLine(t, a, id) // the source goes on
	eventually(t, "the source counts", func() bool { return lastLine(t, a, id) > last })
	must(t, a.r.Destroy(t.Context(), id))
	a.destroy(t)

	sb := s.node(t)
	copied, err := b.goOn(t.Context(), sb, d, open)
	must(t, err)
	before := time.Now()
	now := b.run(t, copied, tell+"; cat /root/file; date +%s")
	old, lines := strings.Split(was.Stdout, "\n"), strings.Split(strings.TrimSpace(now.Stdout), "\n")
	if len(lines) != 6 || lines[0] != string(copied) || lines[4] != "kept" {
		t.Fatalf("%+v", now)
	}
	for i, what := range []string{"host name", "machine id", "uuid", "random bytes"} {
		if lines[i] == "" || lines[i] == old[i] {
			t.Errorf("%s: %q is that of the source", what, lines[i])
		}
	}
	at, err := strconv.ParseInt(lines[5], 10, 64)
	must(t, err)
	if off := time.Unix(at, 0).Sub(before); off < -1500*time.Millisecond || off > time.Since(before) {
		t.Errorf("its clock is %v off", off)
	}
	first := lastLine(t, b, copied)
	eventually(t, "it counts on", func() bool { return lastLine(t, b, copied) > first+2 })
	// A copy is a sandbox as others are.
	must(t, b.r.Stop(t.Context(), copied, 0))
	_, err = b.r.Start(t.Context(), copied)
	must(t, err)
	if o := b.run(t, copied, "cat /root/file"); o.Stdout != "kept\n" {
		t.Errorf("%+v", o)
	}
}

// lastLine is how far the counter has come.
func lastLine(t *testing.T, w *world, id dsec.SandboxID) int {
	t.Helper()
	p, err := w.r.Process(t.Context(), id, "counter")
	must(t, err)
	head, tail, _, err := p.Kept(t.Context(), process.Stdout)
	must(t, err)
	lines := strings.Split(strings.TrimSuffix(string(head)+string(tail), "\n"), "\n")
	n, err := strconv.Atoi(lines[len(lines)-1])
	must(t, err)
	return n
}

// What cannot go on says why, and leaves nothing.
func TestCheckpointsThatCannotGoOn(t *testing.T) {
	if !long {
		t.Skip("it makes many of them, of emulated machines: DSEC_LONG is not set")
	}
	s := newShelf(t)
	a := newWorld(t)
	id := a.create(t)
	a.run(t, id, "head -c 2000000 /dev/urandom > /root/noise; sync")
	st := s.node(t)
	d := a.checkpoint(t, st, id)
	must(t, a.r.Destroy(t.Context(), id))
	fails := func(what string, w *world, class dsec.Class) {
		t.Helper()
		_, err := w.goOn(t.Context(), st, d)
		if dsec.ClassOf(err) != class {
			t.Errorf("%s: %v, want %s", what, err, class)
		}
		t.Logf("%s: %v", what, err)
		w.nothingLeft(t)
	}
	change := func(file string, f func([]byte) []byte, then func()) {
		t.Helper()
		was, err := os.ReadFile(file)
		must(t, err)
		must(t, os.WriteFile(file, f(append([]byte(nil), was...)), 0o600))
		then()
		must(t, os.WriteFile(file, was, 0o600))
	}
	kinds := map[string]func([]byte) int{ // where a bit is flipped
		"checkpoints": func(b []byte) int { return len(b) / 2 },
		"indexes":     func([]byte) int { return 24 + 32 }, // the sum of the first chunk; where a hole would lie means nothing
		"packs":       func(b []byte) int { return len(b) / 2 },
	}
	for kind, where := range kinds {
		flip := func(b []byte) []byte { b[where(b)] ^= 1; return b }
		for _, file := range s.files(t, kind) {
			change(file, flip, func() { fails("a flipped bit in "+kind, a, dsec.Corrupt) })
			change(file, func(b []byte) []byte { return b[:len(b)/2] }, func() { fails("half of "+kind, a, dsec.Corrupt) })
			away := filepath.Join(t.TempDir(), "away")
			must(t, os.Rename(file, away))
			fails("without "+kind, a, dsec.NotFound)
			must(t, os.Rename(away, file))
		}
	}
	if _, err := st.FindCheckpoint(t.Context(), "another", d); dsec.ClassOf(err) != dsec.NotFound {
		t.Errorf("another project: %v", err)
	}
	copied, err := a.goOn(t.Context(), st, d) // and nothing of all that has harmed it
	must(t, err)
	must(t, a.r.Destroy(t.Context(), copied))
	fails("another kernel", newWorld(t, func(w *world) {
		w.machinery = func(m *Machinery) {
			m.Kernel.SHA256 = strings.Repeat("0", 64)
			m.VMM = stranger{m.VMM}
		}
	}), dsec.Unsupported)
}

// stranger is a monitor that has not to boot anything to know what it is.
type stranger struct{ vmm.VMM }

func (s stranger) Probe(context.Context, vmm.Shape, vmm.Ready) (vmm.Caps, error) {
	return vmm.Caps{Version: "QEMU", Accel: "tcg", NoKVM: "it is not asked for"}, nil
}

func (s stranger) OpenSnapshot(dir string) ([]byte, *os.File, error) {
	return s.VMM.(vmm.Carrier).OpenSnapshot(dir)
}

func (s stranger) PlaceSnapshot(ctx context.Context, dir string, about []byte, shape vmm.Shape, fill func(*os.File) error) error {
	return s.VMM.(vmm.Carrier).PlaceSnapshot(ctx, dir, about, shape, fill)
}

// A pool that fills while a checkpoint comes is no room, and nothing of it is left.
func TestCheckpointFindsNoRoom(t *testing.T) {
	if !long {
		t.Skip("it fills a pool and waits for it to be cleaned: DSEC_LONG is not set")
	}
	s := newShelf(t)
	a, b := newWorld(t), newWorld(t, tight)
	large := func(r *runtime.Request) { r.Spec.Limits.Disk = 512 << 20 }
	id := a.create(t, large)
	st := s.node(t)
	must(t, a.r.KeepMoment(t.Context(), id, "kept"))
	m, err := a.r.OpenMoment(t.Context(), "kept")
	must(t, err)
	must(t, a.r.DropMoment(t.Context(), "kept"))
	must(t, a.r.Destroy(t.Context(), id))
	defer closeMoment(m.Files)
	// What an emulated machine would take minutes to write.
	full, err := os.Create(filepath.Join(t.TempDir(), "full"))
	must(t, err)
	defer func() { _ = full.Close() }()
	_, err = io.CopyN(full, rand.NewChaCha8([32]byte{}), 350<<20)
	must(t, err)
	must(t, full.Truncate(m.Disk))
	m.Spec.Image, m.Files.Disk = dsec.LayerRef(kit.base.Digest), full
	c := layer.Checkpoint{Project: checkpointProject, Sandbox: id, Time: time.Now().UTC(), Spec: m.Spec, Machine: m.Machine}
	d, _, err := st.KeepCheckpoint(t.Context(), c, m.Files, time.Now().Add(time.Hour))
	must(t, err)
	before, err := b.disks.Space(t.Context())
	must(t, err)
	if _, err := b.goOn(t.Context(), st, d, large); dsec.ClassOf(err) != dsec.NoSpace {
		t.Errorf("%v, want no_space", err)
	} else {
		t.Log(err)
	}
	b.nothingLeft(t)
	// A pool that was full is cleaned with its next commit, half a minute later; until then it may have room, and none again.
	for deadline := time.Now().Add(2 * time.Minute); ; time.Sleep(100 * time.Millisecond) {
		now, err := b.disks.Space(t.Context())
		must(t, err)
		if now.Free > before.Free-16<<20 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d MiB are free, and %d were", now.Free>>20, before.Free>>20)
		}
	}
}

// A copy that is given up while its memory comes is undone.
func TestCheckpointGivenUp(t *testing.T) {
	s := newShelf(t)
	w := newWorld(t)
	id := w.create(t)
	st := s.node(t)
	d := w.checkpoint(t, st, id)
	must(t, w.r.Destroy(t.Context(), id))
	c, err := st.FindCheckpoint(t.Context(), checkpointProject, d)
	must(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	m := runtime.Moment{Spec: c.Spec, Machine: c.Machine, Disk: c.Disk.Size, Memory: c.Memory.Size}
	err = w.r.BringMoment(ctx, "brought", m, request().Layers.Layers, func(ctx context.Context, f layer.MomentFiles) error {
		cancel()
		return st.FetchCheckpoint(ctx, d, c, f)
	})
	if dsec.ClassOf(err) != dsec.Canceled {
		t.Errorf("%v, want canceled", err)
	}
	w.nothingLeft(t)
}

// What of a layer was mapped is brought whole on the other node before anything maps it there; what was a disk of the machine
// stays one, also where the layer is whole.
func TestCheckpointOnLayersThatAreElsewhere(t *testing.T) {
	if !long {
		t.Skip("it moves an emulated machine twice: DSEC_LONG is not set")
	}
	s := newShelf(t)
	one, two := t.TempDir(), t.TempDir()
	here, err := layertest.Build(one, bigFile)
	must(t, err)
	there, err := layertest.Build(two, bigFile)
	must(t, err)
	partial := func(l layer.Local) string { return filepath.Join(filepath.Dir(l.Data), layer.PresentFile) }
	a := newWorld(t)
	b := newWorld(t)
	st := s.node(t)
	with := func(l layer.Local) func(*runtime.Request) {
		return func(r *runtime.Request) { r.Layers.Layers = append(slices.Clone(r.Layers.Layers), l) }
	}
	const read = "head -c 3 /part05; tail -c 2 /part23"
	kept := func() layer.Digest {
		id := a.create(t, with(here))
		a.run(t, id, "cat /part05 >/dev/null")
		d := a.checkpoint(t, st, id)
		must(t, a.r.Destroy(t.Context(), id))
		return d
	}
	mapped := kept()
	must(t, os.WriteFile(partial(there), nil, 0o600))
	if _, err := b.goOn(t.Context(), st, mapped, with(there)); dsec.ClassOf(err) != dsec.Unavailable {
		t.Errorf("a layer that nobody brings: %v", err)
	}
	b.nothingLeft(t)
	b.complete = func(_ context.Context, l layer.Local) error {
		if l.Data != there.Data {
			t.Errorf("%s is brought", l.Data)
		}
		return os.Remove(partial(there))
	}
	b.reopen(t)
	id, err := b.goOn(t.Context(), st, mapped, with(there))
	must(t, err)
	looks := func(what string, asDisk bool) {
		t.Helper()
		if o := b.run(t, id, read); o.Stdout != "fffxx" {
			t.Errorf("%s: %+v", what, o)
		}
		if rec, err := readRecord(b.r.dir(id), id); err != nil || len(rec.Read) != 2 || rec.Read[1] != asDisk {
			t.Errorf("%s: %+v %v", what, rec, err)
		}
	}
	looks("mapped", false)
	must(t, b.r.Destroy(t.Context(), id))

	a.devices = elsewhere{here.Data} // and a layer that is a disk where it was made
	a.reopen(t)
	must(t, os.WriteFile(partial(here), nil, 0o600))
	disk := kept()
	id, err = b.goOn(t.Context(), st, disk, with(there))
	must(t, err)
	looks("as a disk", true)
}

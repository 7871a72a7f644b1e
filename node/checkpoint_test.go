package node

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/failpoint"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/runtime"
)

// kept is a tier whose sandboxes can be kept: their memory is a word.
type kept struct {
	runtime.Runtime
	dir string

	mu      sync.Mutex
	moments map[string]string
	kernel  string                           // that it has; what is of another it cannot go on from
	from    map[dsec.SandboxID]string        // what each went on from
	specs   map[dsec.SandboxID]dsec.Spec     // of each
	layers  map[dsec.SandboxID][]layer.Local // likewise
}

func newKept(t *testing.T, rt runtime.Runtime) *kept {
	return &kept{Runtime: rt, dir: t.TempDir(), moments: map[string]string{}, kernel: "k", from: map[dsec.SandboxID]string{},
		specs: map[dsec.SandboxID]dsec.Spec{}, layers: map[dsec.SandboxID][]layer.Local{}}
}

func (k *kept) Create(ctx context.Context, r runtime.Request) ([]dsec.Step, error) {
	k.mu.Lock()
	word, ok := k.moments[r.From]
	k.from[r.ID], k.specs[r.ID], k.layers[r.ID] = word, r.Spec, r.Layers.Layers
	k.mu.Unlock()
	if r.From != "" && !ok {
		return nil, dsec.Errorf(dsec.NotFound, "find moment", r.From, "there is none")
	}
	return k.Runtime.Create(ctx, r)
}

func (k *kept) KeepMoment(_ context.Context, id dsec.SandboxID, name string) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.moments[name] = "memory of " + string(id)
	return nil
}

func (k *kept) DropMoment(_ context.Context, name string) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.moments, name)
	return nil
}

func (k *kept) OpenMoment(_ context.Context, name string) (m runtime.Moment, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	m.Machine = []byte(`{"kernel":"` + k.kernel + `"}`)
	for what, f := range map[string]**os.File{"disk": &m.Files.Disk, k.moments[name]: &m.Files.Memory} {
		file := filepath.Join(k.dir, dsec.Random(8))
		if err := os.WriteFile(file, []byte(what), 0o600); err != nil {
			return m, err
		}
		if *f, err = os.Open(file); err != nil {
			return m, err
		}
	}
	return m, nil
}

func (k *kept) BringMoment(ctx context.Context, name string, m runtime.Moment, _ []layer.Local, fill func(context.Context, layer.MomentFiles) error) error {
	if string(m.Machine) != `{"kernel":"`+k.kernel+`"}` {
		return dsec.Errorf(dsec.Unsupported, "bring moment", name, "it is of another kernel")
	}
	var f layer.MomentFiles
	for _, to := range []**os.File{&f.Disk, &f.Memory} {
		var err error
		if *to, err = os.CreateTemp(k.dir, "brought"); err != nil {
			return err
		}
		defer (*to).Close()
	}
	if err := fill(ctx, f); err != nil {
		return err
	}
	b, err := os.ReadFile(f.Memory.Name())
	k.mu.Lock()
	defer k.mu.Unlock()
	k.moments[name] = string(b)
	return err
}

// none checks that no moment is left.
func (k *kept) none(t *testing.T) {
	t.Helper()
	k.mu.Lock()
	defer k.mu.Unlock()
	if len(k.moments) > 0 {
		t.Errorf("moments are left: %v", k.moments)
	}
}

// rack keeps checkpoints in memory, for any number of nodes.
type rack struct {
	mu   sync.Mutex
	all  map[layer.Digest]layer.Checkpoint
	text map[layer.Digest]string
	fail error // of a fetch
}

func (s *rack) KeepCheckpoint(_ context.Context, c layer.Checkpoint, f layer.MomentFiles, _ time.Time) (layer.Digest, layer.Checkpoint, error) {
	b, err := io.ReadAll(f.Memory)
	if err != nil {
		return "", c, err
	}
	c.Version, c.Disk.Size, c.Memory.Size = layer.CheckpointVersion, 4, int64(len(b))
	d := layer.DigestOf(b)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all[d], s.text[d] = c, string(b)
	return d, c, nil
}

func (s *rack) FindCheckpoint(_ context.Context, project string, d layer.Digest) (layer.Checkpoint, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c, ok := s.all[d]
	if !ok || c.Project != project {
		return layer.Checkpoint{}, dsec.Errorf(dsec.NotFound, "find checkpoint", string(d), "there is none")
	}
	return c, nil
}

func (s *rack) FetchCheckpoint(_ context.Context, d layer.Digest, _ layer.Checkpoint, f layer.MomentFiles) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fail != nil {
		return s.fail
	}
	_, err := f.Memory.WriteString(s.text[d])
	return err
}

func newRack() *rack {
	return &rack{all: map[layer.Digest]layer.Checkpoint{}, text: map[layer.Digest]string{}}
}

// keeping is a world whose tier and storage keep checkpoints.
func keeping(t *testing.T, s *rack) (*world, *kept) {
	w := newWorld(t, func(c *Config) { c.Checkpoints = s })
	k := newKept(t, w.fake)
	w.cfg.Runtimes[dsec.TierContainer] = k
	return w, k
}

// A checkpoint of one node is what a sandbox of another one goes on from: with what it was made of, and the
// network of then. The same call is the same checkpoint, also for the next agent.
func TestCheckpointAndGoOnElsewhere(t *testing.T) {
	ctx, s := t.Context(), newRack()
	a, ka := keeping(t, s)
	sb := a.create(func(s *dsec.Spec) { s.Name, s.User, s.Labels = "work", "1000", map[string]string{"l": "1"} })
	made, err := a.Checkpoint(ctx, sb.ID, time.Hour, "call")
	if err != nil {
		t.Fatal(err)
	}
	ka.none(t)
	if made.Sandbox != sb.ID || !made.Until.Equal(a.clock.Now().Add(time.Hour)) || made.Spec.Name != "" || made.Spec.Hostname != "" || string(made.Spec.Image) != sb.Digests[0] {
		t.Errorf("%+v", made)
	}
	a.crash()
	a.cfg.Runtimes[dsec.TierContainer] = ka
	if again, err := a.Checkpoint(ctx, sb.ID, time.Hour, "call"); err != nil || again.Digest != made.Digest || !again.Time.Equal(made.Time) {
		t.Errorf("%+v %v", again, err)
	}
	if _, err := a.Checkpoint(ctx, sb.ID, time.Minute, "call"); dsec.ClassOf(err) != dsec.Conflict {
		t.Errorf("the same call with other parameters: %v", err)
	}

	b, kb := keeping(t, s)
	from, err := (dsec.Spec{Checkpoint: made.Digest, Name: "again", CallID: "new"}).GoesOnFrom(made.Spec)
	if err != nil {
		t.Fatal(err)
	}
	copied, err := b.Create(ctx, "proj", from)
	if err != nil {
		t.Fatal(err)
	}
	kb.none(t)
	spec := kb.specs[copied.ID]
	if kb.from[copied.ID] != "memory of "+string(sb.ID) || spec.User != "1000" || spec.Labels["l"] != "1" || spec.Hostname != string(copied.ID) || spec.Name != "again" {
		t.Errorf("%q %+v", kb.from[copied.ID], spec)
	}
	for i, l := range kb.layers[copied.ID] {
		if string(l.Digest) != sb.Digests[i] {
			t.Errorf("layer %d is %s, was %s", i, l.Digest, sb.Digests[i])
		}
	}
	if same, err := b.Create(ctx, "proj", from); err != nil || same.ID != copied.ID {
		t.Errorf("%v %v", same.ID, err)
	}
	forked, err := b.Fork(ctx, copied.ID, 1, "") // of itself, not of the checkpoint
	if err != nil || kb.from[forked[0].ID] != "memory of "+string(copied.ID) || forked[0].Spec.Checkpoint != "" {
		t.Errorf("%+v %v", forked, err)
	}
}

// What cannot go on says why with the class of it, and leaves nothing.
func TestWhatCannotGoOnLeavesNothing(t *testing.T) {
	ctx, s := t.Context(), newRack()
	w, k := keeping(t, s)
	sb := w.create(nil)
	made, err := w.Checkpoint(ctx, sb.ID, 0, "")
	if err != nil || !made.Until.Equal(w.clock.Now().Add(dsec.KeepCheckpoint)) {
		t.Fatal(made, err)
	}
	if _, err := w.Delete(ctx, sb.ID, ""); err != nil {
		t.Fatal(err)
	}
	spec, err := (dsec.Spec{Checkpoint: made.Digest}).GoesOnFrom(made.Spec)
	if err != nil {
		t.Fatal(err)
	}
	fails := func(what, project string, class dsec.Class, cause dsec.Cause, change func(*dsec.Spec)) {
		t.Helper()
		asked := spec
		if change != nil {
			change(&asked)
		}
		_, err := w.Create(ctx, project, asked)
		e, ok := errors.AsType[*dsec.Error](err)
		if !ok || e.Class != class || e.Op == "" || e.Object == "" {
			t.Errorf("%s: %v, want %s", what, err, class)
		} else if end, gerr := w.Get(ctx, dsec.SandboxID(e.Object)); cause != "" && (gerr != nil || end.Result == nil || end.Result.Cause != cause) {
			t.Errorf("%s: %+v %v, want %s", what, end.Result, gerr, cause)
		}
		k.none(t)
		w.empty()
	}
	fails("another project", "other", dsec.NotFound, dsec.CauseTaskImageNotFound, nil)
	fails("one that is not there", "proj", dsec.NotFound, dsec.CauseTaskImageNotFound, func(s *dsec.Spec) { s.Checkpoint = "sha256:" + strings.Repeat("0", 64) })
	fails("no digest", "proj", dsec.Invalid, "", func(s *dsec.Spec) { s.Checkpoint = "latest" })
	fails("other limits", "proj", dsec.Invalid, dsec.CauseTaskInvalid, func(s *dsec.Spec) { s.Limits.Memory *= 2 })
	for class, cause := range map[dsec.Class]dsec.Cause{dsec.Corrupt: dsec.CauseInfraImage, dsec.NotFound: dsec.CauseInfraImage, dsec.NoSpace: dsec.CauseInfraCapacity} {
		s.fail = dsec.Errorf(class, "fetch checkpoint", made.Digest, "broken on purpose")
		fails("a fetch that is "+string(class), "proj", class, cause, nil)
	}
	s.fail = nil
	k.kernel = "another"
	fails("another kernel", "proj", dsec.Unsupported, dsec.CauseTaskInvalid, nil)
	k.kernel = "k"
	disarm := failpoint.Arm("node.checkpoint.brought", failpoint.Once(dsec.Errorf(dsec.Invalid, "break", "it", "on purpose")))
	fails("a fault behind the fetch", "proj", dsec.Invalid, dsec.CauseTaskInvalid, nil)
	disarm()
	w.cfg.Runtimes[dsec.TierContainer] = w.fake
	fails("a tier that cannot", "proj", dsec.Unsupported, "", nil)
	w.cfg.Runtimes[dsec.TierContainer] = k
	w.Node.cfg.Checkpoints = nil
	fails("no object storage", "proj", dsec.Unsupported, "", nil)
}

// A checkpoint that fails leaves the sandbox running and no moment; a tier that cannot says so.
func TestCheckpointsThatFail(t *testing.T) {
	ctx, s := t.Context(), newRack()
	w, k := keeping(t, s)
	sb := w.create(nil)
	disarm := failpoint.Arm("node.checkpoint.kept", failpoint.Once(dsec.Errorf(dsec.Unavailable, "break", "it", "on purpose")))
	_, err := w.Checkpoint(ctx, sb.ID, 0, "c")
	disarm()
	if dsec.ClassOf(err) != dsec.Unavailable || w.stateOf(sb.ID) != dsec.Running || len(s.all) > 0 {
		t.Errorf("%v, %s, %v", err, w.stateOf(sb.ID), s.all)
	}
	k.none(t)
	if _, err := w.Checkpoint(ctx, sb.ID, 0, "c"); err != nil { // it is not remembered as an error
		t.Error(err)
	}
	if _, err := w.Checkpoint(ctx, sb.ID, 31*24*time.Hour, ""); dsec.ClassOf(err) != dsec.Invalid {
		t.Errorf("kept for too long: %v", err)
	}
	if _, err := w.Stop(ctx, sb.ID, "", ""); err != nil {
		t.Fatal(err)
	}
	if _, err := w.Checkpoint(ctx, sb.ID, 0, ""); dsec.ClassOf(err) != dsec.IllegalState {
		t.Errorf("of one that is stopped: %v", err)
	}
	w.cfg.Runtimes[dsec.TierContainer] = w.fake
	plain := w.create(nil)
	if _, err := w.Checkpoint(ctx, plain.ID, 0, ""); dsec.ClassOf(err) != dsec.Unsupported {
		t.Errorf("a tier that cannot: %v", err)
	}
}

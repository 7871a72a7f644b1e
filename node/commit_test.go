package node

import (
	"context"
	"errors"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/image"
	"github.com/opendsec/dsec/image/erofs"
	"github.com/opendsec/dsec/internal/failpoint"
	"github.com/opendsec/dsec/layer"
)

// shelf takes layers as a store does.
type shelf struct {
	t    *testing.T
	mu   sync.Mutex
	made map[string]shelved // by tag
	fail error
}

type shelved struct {
	layer.New
	lineage dsec.Lineage
	names   []string
}

func newShelf(t *testing.T) *shelf { return &shelf{t: t, made: map[string]shelved{}} }

func (s *shelf) add(_ context.Context, n layer.New, fill func(image.Files) (dsec.Lineage, error)) (layer.Info, error) {
	var f image.Files
	for _, to := range []**os.File{&f.Meta, &f.Data} {
		file, err := os.CreateTemp(s.t.TempDir(), "")
		if err != nil {
			return layer.Info{}, err
		}
		defer file.Close()
		*to = file
	}
	l, err := fill(f)
	if err != nil {
		return layer.Info{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fail != nil {
		return layer.Info{}, s.fail
	}
	st, err := f.Meta.Stat()
	if err != nil {
		return layer.Info{}, err
	}
	im, err := erofs.Open(f.Meta, st.Size(), f.Data)
	if err != nil {
		return layer.Info{}, err
	}
	made := shelved{New: n, lineage: l}
	err = im.Walk(func(name string, _ *erofs.Node) error {
		made.names = append(made.names, name)
		return nil
	})
	s.made[n.Tag.Name] = made
	return layer.Info{Digest: layer.DigestOf([]byte(n.Tag.Name)), Lineage: &l}, err
}

func (s *shelf) get(tag string) (shelved, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	m, ok := s.made[tag]
	return m, ok
}

func withShelf(t *testing.T) (*world, *shelf) {
	s := newShelf(t)
	return newWorld(t, func(c *Config) { c.Add = s.add }), s
}

func TestCommitOfARunningSandboxLeavesItRunning(t *testing.T) {
	w, s := withShelf(t)
	sb := w.create(nil)
	w.run(sb.ID, "echo x > /root/f")
	tag := layer.Tag{Name: "mine:1", Project: "p"}
	var first dsec.Packed
	for i := range 2 {
		p, err := w.Commit(t.Context(), sb.ID, tag, dsec.Scrub{}, "c")
		if err != nil || p.Digest != string(layer.DigestOf([]byte("mine:1"))) || p.Tag != "mine:1" {
			t.Fatal(p, err)
		}
		if i == 0 {
			first = p
			delete(s.made, "mine:1")
		} else if _, again := s.get("mine:1"); again || !p.Lineage.Time.Equal(first.Lineage.Time) {
			t.Error("the same call was done twice")
		}
	}
	if got, _ := w.Get(t.Context(), sb.ID); got.State != dsec.Running || !slices.Equal(first.Lineage.Parents, got.Digests) || first.Lineage.Sandbox != sb.ID {
		t.Errorf("%s %+v", got.State, first.Lineage)
	}
	w.run(sb.ID, "echo still here")
	_, err := w.Commit(t.Context(), sb.ID, layer.Tag{Name: "other:1"}, dsec.Scrub{}, "c")
	wantClass(t, err, dsec.Conflict)
	_, err = w.Commit(t.Context(), sb.ID, layer.Tag{Name: "bad tag"}, dsec.Scrub{}, "")
	wantClass(t, err, dsec.Invalid)
	_, err = w.Commit(t.Context(), sb.ID, tag, dsec.Scrub{Answers: []string{"x"}}, "")
	wantClass(t, err, dsec.Invalid)
	s.fail = dsec.E(dsec.NoSpace, "add", "", nil)
	_, err = w.Commit(t.Context(), sb.ID, tag, dsec.Scrub{}, "")
	wantClass(t, err, dsec.NoSpace)
	s.fail = nil
	if _, err := w.Stop(t.Context(), sb.ID, "", ""); err != nil {
		t.Fatal(err)
	}
	if _, err := w.Commit(t.Context(), sb.ID, layer.Tag{}, dsec.Scrub{}, ""); err != nil {
		t.Errorf("stopped, without a tag: %v", err)
	}
	if got, _ := s.get(""); strings.Join(got.names, " ") != "root root/f" {
		t.Errorf("packed %v", got.names)
	}
	if leases, _ := w.store.Leases(t.Context()); len(leases) != 1 || leases[0] != string(sb.ID) {
		t.Errorf("leases %v", leases)
	}
}

func TestTheDiskOfAFailedSandboxIsKept(t *testing.T) {
	w, s := withShelf(t)
	keep := func(s *dsec.Spec) { s.Lifetimes.KeepFailed = 24 * time.Hour }
	failed, good, plain := w.create(keep), w.create(keep), w.create(nil)
	for _, sb := range []Sandbox{failed, good, plain} {
		w.run(sb.ID, "echo x > /root/f")
	}
	for id, cause := range map[dsec.SandboxID]dsec.Cause{failed.ID: dsec.CauseAgentError, good.ID: dsec.CauseCompleted, plain.ID: dsec.CauseAgentError} {
		if _, err := w.Stop(t.Context(), id, cause, ""); err != nil {
			t.Fatal(err)
		}
	}
	if c, err := w.Changes(t.Context(), failed.ID, 0); err != nil || len(c.List) != 1 || c.List[0].Path != "/root/f" {
		t.Errorf("changes of a stopped one %+v %v", c, err)
	}
	for _, sb := range []Sandbox{failed, good, plain} {
		if existed, err := w.Delete(t.Context(), sb.ID, ""); !existed || err != nil {
			t.Fatal(existed, err)
		}
	}
	got, err := w.Get(t.Context(), failed.ID)
	if err != nil || got.Kept == nil || got.Kept.Tag != "kept/"+string(failed.ID) || got.Kept.Until.Sub(w.clock.Now()) != 24*time.Hour {
		t.Fatalf("%+v %v", got.Kept, err)
	}
	made, _ := s.get(got.Kept.Tag)
	if made.Tag.Project != failed.Project || !made.Tag.Expires.Equal(got.Kept.Until) || strings.Join(made.names, " ") != "root root/f" {
		t.Errorf("kept %+v", made)
	}
	if len(s.made) != 1 {
		t.Errorf("kept %d disks", len(s.made))
	}
	w.clock.add(23 * time.Hour) // the next day
	if _, err := w.Changes(t.Context(), failed.ID, 0); errors.Is(err, dsec.SandboxGone.Err()) {
		t.Errorf("changes the next day: %v", err)
	}
	w.clock.add(2 * time.Hour)
	if _, err := w.Changes(t.Context(), failed.ID, 0); !errors.Is(err, dsec.SandboxGone.Err()) {
		t.Errorf("changes when it is kept no more: %v", err)
	}
	for _, sb := range []Sandbox{good, plain} {
		if got, err := w.Get(t.Context(), sb.ID); err != nil || got.Kept != nil {
			t.Errorf("%+v %v", got.Kept, err)
		}
	}
	// A disk that cannot be kept keeps nobody from deleting.
	s.fail = dsec.E(dsec.NoSpace, "add", "", nil)
	full := w.create(keep)
	w.machine.Crash(full.ID, dsec.CauseOOM, dsec.InducedBySelf)
	w.until("it has failed", func() bool { return w.stateOf(full.ID) == dsec.Failed })
	if _, err := w.Delete(t.Context(), full.ID, ""); err != nil {
		t.Fatal(err)
	}
	r, err := w.Record(t.Context(), full.ID)
	if err != nil || r.Kept != nil || !strings.Contains(notes(r.Events), "could not be kept") {
		t.Errorf("%+v %q %v", r.Kept, notes(r.Events), err)
	}
}

func notes(events []dsec.Event) string {
	var all []string
	for _, e := range events {
		if e.Type == dsec.EventNote {
			all = append(all, e.Detail)
		}
	}
	return strings.Join(all, "; ")
}

// TestKeepingSurvivesTheAgent: an agent that ends between the packing and the
// removal leaves a sandbox that the next one keeps and removes.
func TestKeepingSurvivesTheAgent(t *testing.T) {
	w, s := withShelf(t)
	sb := w.create(func(s *dsec.Spec) { s.Lifetimes.KeepFailed = time.Hour })
	w.run(sb.ID, "echo x > /root/f")
	if _, err := w.Stop(t.Context(), sb.ID, dsec.CauseAgentError, ""); err != nil {
		t.Fatal(err)
	}
	disarm := failpoint.Arm("node.delete.runtime", func(context.Context, string) error { return dsec.E(dsec.Internal, "armed", "", nil) })
	_, err := w.Delete(t.Context(), sb.ID, "")
	disarm()
	wantClass(t, err, dsec.Internal)
	s.fail = dsec.E(dsec.Internal, "pack", "again", nil) // once is enough
	w.shut()
	w.open()
	w.clock.add(time.Minute)
	w.sweep()
	w.until("it is removed", func() bool { return w.find(sb.ID) == nil })
	got, err := w.Get(t.Context(), sb.ID)
	if err != nil || got.Kept == nil || got.Kept.Tag != "kept/"+string(sb.ID) {
		t.Errorf("%+v %v", got.Kept, err)
	}
}

// slow has packs wait until their context ends.
func slow(t *testing.T) (packing chan dsec.SandboxID) {
	t.Helper()
	packing = make(chan dsec.SandboxID, 16)
	t.Cleanup(failpoint.Arm("node.pack.add", func(ctx context.Context, _ string) error {
		packing <- ""
		<-ctx.Done()
		return context.Cause(ctx)
	}))
	return packing
}

// TestDeletingEndsACommit: nobody waits for the pack of a disk that goes.
func TestDeletingEndsACommit(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.Add = newShelf(t).add })
	sb := w.create(nil)
	packing := slow(t)
	ended := make(chan error, 1)
	go func() {
		_, err := w.Commit(t.Context(), sb.ID, layer.Tag{}, dsec.Scrub{}, "")
		ended <- err
	}()
	<-packing
	if existed, err := w.Delete(t.Context(), sb.ID, ""); err != nil || !existed {
		t.Errorf("%v, %v", existed, err)
	}
	if err := <-ended; err == nil {
		t.Error("committed")
	}
}

// TestOneProjectDoesNotTakeAllPacks: however many disks of it are slow, another
// packs, and who waits in vain leaves nothing.
func TestOneProjectDoesNotTakeAllPacks(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.Add = newShelf(t).add })
	packing := slow(t)
	ctx, stop := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	commit := func(project string) {
		sb, err := w.Create(t.Context(), project, dsec.Spec{Tier: dsec.TierContainer, Image: "base"})
		if err != nil {
			t.Fatal(err)
		}
		wg.Go(func() { _, _ = w.Commit(ctx, sb.ID, layer.Tag{}, dsec.Scrub{}, "") })
	}
	for range packsAtOnce {
		commit("greedy")
	}
	for range projectPacks {
		<-packing
	}
	commit("other")
	<-packing
	if len(packing) != 0 {
		t.Errorf("%d more are packing", len(packing))
	}
	stop()
	wg.Wait()
	if len(w.packs.own) != 0 {
		t.Errorf("projects stay: %v", w.packs.own)
	}
}

package node

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/failpoint"
)

// createPoints are the failpoints on the way of a creation.
func createPoints(t *testing.T, w *world) []string {
	t.Helper()
	stop := failpoint.Record()
	sb := w.create(nil)
	names := stop()
	if _, err := w.Delete(t.Context(), sb.ID, ""); err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, n := range names {
		if n != "node.ledger.commit" {
			out = append(out, n)
		}
	}
	if len(out) < 14 {
		t.Fatalf("only %v", out)
	}
	return out
}

func TestG5_AFailureAtAnyStepLeavesNothing(t *testing.T) {
	w := newWorld(t, nil)
	for _, name := range createPoints(t, w) {
		disarm := failpoint.Arm(name, failpoint.Times(2, nil)) // also in the second try
		_, err := w.Create(t.Context(), "proj", spec(func(s *dsec.Spec) { s.Name, s.CallID = "n", "c-"+name }))
		disarm()
		if err == nil {
			t.Errorf("%s: no error", name)
		}
		w.empty()
		if e, ok := errors.AsType[*dsec.Error](err); !ok || e.Op != "create sandbox" {
			t.Errorf("%s: error %v", name, err)
		} else if r, err := w.Get(t.Context(), dsec.SandboxID(e.Object)); err != nil || r.Result == nil || !r.Result.Cause.Infra() {
			t.Errorf("%s: record %+v %v", name, r, err)
		}
		if t.Failed() {
			t.Fatalf("at %s", name)
		}
	}
}

func TestG6_AKillAtAnyStepLeavesNothing(t *testing.T) {
	w := newWorld(t, nil)
	for _, name := range createPoints(t, w) {
		entered, release := make(chan string, 1), make(chan struct{})
		disarm := failpoint.Arm(name, failpoint.Block(entered, release))
		done := make(chan error, 1)
		go func() {
			_, err := w.Create(context.Background(), "proj", spec(func(s *dsec.Spec) { s.Name, s.CallID = "n", "k-"+name }))
			done <- err
		}()
		<-entered
		path := filepath.Join(w.cfg.Dir, "ledger.db")
		saved, err := os.ReadFile(path) // what a kill at this moment leaves
		if err != nil {
			t.Fatal(err)
		}
		close(release)
		if err := <-done; err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		disarm()
		w.shut()
		if err := os.WriteFile(path, saved, 0o600); err != nil {
			t.Fatal(err)
		}
		w.open()
		sb, err := w.Create(t.Context(), "proj", spec(func(s *dsec.Spec) { s.Name, s.CallID = "n", "k-"+name })) // the caller asks again
		if err != nil || sb.State != dsec.Running {
			t.Fatalf("%s: again: %+v %v", name, sb, err)
		}
		w.until("one is left", func() bool { l, _ := w.store.Leases(t.Context()); return len(w.machine.Residue()) == 1 && len(l) == 1 })
		if _, err := w.Delete(t.Context(), sb.ID, ""); err != nil {
			t.Fatal(err)
		}
		w.empty()
	}
}

func TestG10_OneRetryInsideIsCounted(t *testing.T) {
	w := newWorld(t, nil)
	disarm := failpoint.Arm("fake.create.start.before", failpoint.Once(dsec.E(dsec.Internal, "start", "", errors.New("flaky"))))
	defer disarm()
	sb := w.create(nil)
	if sb.State != dsec.Running {
		t.Fatalf("%+v", sb)
	}
	if n := counted(t, w.cfg.Metrics.retries); n != 1 {
		t.Fatalf("%v retries", n)
	}
	if n := counted(t, w.cfg.Metrics.creations.WithLabelValues("ok")); n != 1 {
		t.Fatalf("%v creations", n)
	}
}

func TestAWrongImageIsTheTasksFault(t *testing.T) {
	w := newWorld(t, nil)
	_, err := w.Create(t.Context(), "proj", spec(func(s *dsec.Spec) { s.Layers = []dsec.LayerRef{"missing:1"} }))
	wantClass(t, err, dsec.NotFound)
	if !strings.Contains(err.Error(), "missing:1") {
		t.Errorf("error %v does not name the ref", err)
	}
	e, _ := errors.AsType[*dsec.Error](err)
	sb, err := w.Get(t.Context(), dsec.SandboxID(e.Object))
	if err != nil || sb.Result.Cause != dsec.CauseTaskImageNotFound || sb.Result.Mask() || sb.Result.Phase != "layers" {
		t.Fatalf("%+v %v", sb.Result, err)
	}
	if n := counted(t, w.cfg.Metrics.retries); n != 0 {
		t.Errorf("%v retries of what cannot succeed", n)
	}
	_, err = w.Create(t.Context(), "proj", spec(func(s *dsec.Spec) { s.Command = []string{"/no/such"} }))
	wantClass(t, err, dsec.FileNotFound)
	e, _ = errors.AsType[*dsec.Error](err)
	if sb, err = w.Get(t.Context(), dsec.SandboxID(e.Object)); err != nil || sb.Result.Cause != dsec.CauseTaskSetup {
		t.Fatalf("%+v %v", sb.Result, err)
	}
	w.empty()
}

func TestG13_ParallelCreationsOfOneName(t *testing.T) {
	w := newWorld(t, nil)
	var wg sync.WaitGroup
	errs := make([]error, 50)
	for i := range errs {
		wg.Go(func() {
			_, errs[i] = w.Create(t.Context(), "proj", spec(func(s *dsec.Spec) {
				if i%2 == 0 {
					s.Name = "same"
				}
			}))
		})
	}
	wg.Wait()
	named := 0
	for i, err := range errs {
		switch {
		case i%2 == 0 && err == nil:
			named++
		case i%2 == 0:
			wantClass(t, err, dsec.AlreadyExists)
		case err != nil:
			t.Error(err)
		}
	}
	list, err := w.List(t.Context(), Filter{Project: "proj"})
	if named != 1 || len(list) != 26 || err != nil {
		t.Fatalf("%d of the name, %d listed, %v", named, len(list), err)
	}
	if _, err := w.Create(t.Context(), "other", spec(func(s *dsec.Spec) { s.Name = "same" })); err != nil {
		t.Errorf("in another project: %v", err)
	}
}

func TestG15_ADeadSandboxDoesNotBlockItsName(t *testing.T) {
	w := newWorld(t, nil)
	name := func(s *dsec.Spec) { s.Name = "box" }
	a := w.create(name)
	w.machine.Crash(a.ID, dsec.CauseAgentDamage, dsec.InducedBySelf, "pid 1 was killed")
	w.until("it failed", func() bool { return w.stateOf(a.ID) == dsec.Failed })
	b := w.create(name)
	if _, err := w.Stop(t.Context(), b.ID, dsec.CauseCompleted, ""); err != nil {
		t.Fatal(err)
	}
	c := w.create(name)
	_, err := w.Start(t.Context(), b.ID, "")
	wantClass(t, err, dsec.AlreadyExists)
	if w.stateOf(b.ID) != dsec.Stopped {
		t.Fatal("the one that lost its name was harmed")
	}
	if _, err := w.Delete(t.Context(), c.ID, ""); err != nil {
		t.Fatal(err)
	}
	if sb, err := w.Start(t.Context(), b.ID, ""); err != nil || sb.Starts != 2 {
		t.Fatalf("%+v %v", sb, err)
	}
}

func TestG16_LifetimesWithoutBoundAreRefused(t *testing.T) {
	w := newWorld(t, nil)
	for _, l := range []dsec.Lifetimes{{Idle: -1}, {Lifetime: -time.Second}, {Retention: -1}, {Lifetime: dsec.MaxLifetime + 1}, {Idle: 1 << 62}} {
		_, err := w.Create(t.Context(), "proj", spec(func(s *dsec.Spec) { s.Lifetimes = l }))
		wantClass(t, err, dsec.Invalid)
	}
	sb := w.create(nil)
	for _, d := range []time.Duration{-1, dsec.MaxLifetime + 1} {
		_, err := w.Renew(t.Context(), sb.ID, d, "")
		wantClass(t, err, dsec.Invalid)
	}
}

func TestIdempotentCreate(t *testing.T) {
	w := newWorld(t, nil)
	with := func(id string) func(*dsec.Spec) { return func(s *dsec.Spec) { s.CallID = id } }
	var wg sync.WaitGroup
	ids := make([]dsec.SandboxID, 20)
	for i := range ids {
		wg.Go(func() {
			sb, err := w.Create(t.Context(), "proj", spec(with("key")))
			if err != nil || sb.State != dsec.Running {
				t.Errorf("%+v %v", sb, err)
			}
			ids[i] = sb.ID
		})
	}
	wg.Wait()
	for _, id := range ids {
		if id != ids[0] {
			t.Fatalf("%s and %s", id, ids[0])
		}
	}
	_, err := w.Create(t.Context(), "proj", spec(func(s *dsec.Spec) { s.CallID = "key"; s.Limits.Pids = 99 }))
	wantClass(t, err, dsec.Conflict)
	if sb, err := w.Create(t.Context(), "other", spec(with("key"))); err != nil || sb.ID == ids[0] {
		t.Fatalf("another project: %v %v", sb.ID, err)
	}
	for _, again := range []func(){func() { w.shut(); w.open() }, w.crash} {
		again()
		if sb := w.create(with("key")); sb.ID != ids[0] || sb.State != dsec.Running {
			t.Fatalf("after reopening: %+v", sb)
		}
	}
	if existed, err := w.Delete(t.Context(), ids[0], "del"); !existed || err != nil {
		t.Fatal(existed, err)
	}
	if sb := w.create(with("key")); sb.ID != ids[0] || sb.State != dsec.Deleted {
		t.Fatalf("nothing restarts blank: %+v", sb)
	}
	w.clock.add(25 * time.Hour)
	w.sweep()
	if sb := w.create(with("key")); sb.ID == ids[0] {
		t.Fatal("the key is remembered after a day")
	}
}

func TestFailedCreationsCanBeTriedAgainWithTheirKey(t *testing.T) {
	w := newWorld(t, nil)
	key := func(s *dsec.Spec) { s.CallID = "k" }
	disarm := failpoint.Arm("node.build.ready.after", failpoint.Times(2, nil))
	_, err := w.Create(t.Context(), "proj", spec(key))
	disarm()
	if err == nil {
		t.Fatal("no error")
	}
	if sb := w.create(key); sb.State != dsec.Running {
		t.Fatalf("%+v", sb)
	}
}

func TestCancelledCreate(t *testing.T) {
	w := newWorld(t, nil)
	for _, key := range []string{"", "key"} {
		entered, release := make(chan string, 1), make(chan struct{})
		disarm := failpoint.Arm("fake.create.start.before", failpoint.Block(entered, release))
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() {
			_, err := w.Create(ctx, "proj", spec(func(s *dsec.Spec) { s.CallID = key }))
			done <- err
		}()
		<-entered
		cancel()
		if key != "" { // it goes on, for the caller to ask again
			wantClass(t, <-done, dsec.Canceled)
			close(release)
			w.until("it is ready", func() bool {
				l, _ := w.List(t.Context(), Filter{States: []dsec.State{dsec.Running}})
				return len(l) == 1
			})
			disarm()
			w.clock.add(2 * time.Minute)
			w.until("nobody asked: it is removed", func() bool { l, _ := w.List(t.Context(), Filter{}); return len(l) == 0 })
		} else {
			wantClass(t, <-done, dsec.Canceled)
			disarm()
		}
		w.empty()
	}
}

func TestAdmission(t *testing.T) {
	w := newWorld(t, func(c *Config) {
		c.Budgets = Budgets{CPU: 4, Memory: 256 << 20, Disk: 1 << 30, MaxLive: 3, CPUFactor: 1, MemoryFactor: 1, DiskFactor: 1}
	})
	for what, change := range map[string]func(*dsec.Spec){
		"cpu":    func(s *dsec.Spec) { s.Limits.CPU = 5 },
		"memory": func(s *dsec.Spec) { s.Limits.Memory = 1 << 30 },
		"disk":   func(s *dsec.Spec) { s.Limits.Disk = 2 << 30 },
	} {
		_, err := w.Create(t.Context(), "proj", spec(change))
		wantClass(t, err, dsec.ResourceExhausted)
		if !strings.Contains(err.Error(), what) {
			t.Errorf("%v does not say that %s is short", err, what)
		}
	}
	w.empty()
	a := w.create(nil)
	w.create(nil)
	w.create(nil)
	_, err := w.Create(t.Context(), "proj", spec(nil))
	wantClass(t, err, dsec.ResourceExhausted)
	if l := w.Load(); l.Live != 3 || l.CPU != 0.75 || l.Memory != 0.75 {
		t.Errorf("load %+v", l)
	}
	if _, err := w.Stop(t.Context(), a.ID, dsec.CauseCompleted, ""); err != nil {
		t.Fatal(err)
	}
	w.create(nil)
	_, err = w.Start(t.Context(), a.ID, "")
	wantClass(t, err, dsec.ResourceExhausted)
	w.Drain(true)
	_, err = w.Create(t.Context(), "proj", spec(nil))
	wantClass(t, err, dsec.Unavailable)
	if !w.Load().Draining {
		t.Error("load does not say so")
	}
	_, err = w.Create(t.Context(), "proj", spec(func(s *dsec.Spec) { s.Tier = dsec.TierMicroVM }))
	wantClass(t, err, dsec.Unsupported)
}

func TestStartLimit(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.StartLimit, c.StartQueue = 2, 3 })
	entered, release := make(chan string, 10), make(chan struct{})
	disarm := failpoint.Arm("fake.create.start.before", failpoint.Block(entered, release))
	defer disarm()
	done := make(chan error, 10)
	for range 5 {
		go func() { _, err := w.Create(t.Context(), "proj", spec(nil)); done <- err }()
	}
	<-entered
	<-entered
	w.until("three wait", func() bool { return w.Load().Starting == 5 })
	select {
	case <-entered:
		t.Fatal("a third is at work")
	default:
	}
	_, err := w.Create(t.Context(), "proj", spec(nil))
	wantClass(t, err, dsec.ResourceExhausted)
	close(release)
	for range 5 {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}

func TestHostMountsOnlyUnderAllowedRoots(t *testing.T) {
	root := t.TempDir()
	if err := os.MkdirAll(filepath.Join(root, "data"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/", filepath.Join(root, "out")); err != nil {
		t.Fatal(err)
	}
	w := newWorld(t, func(c *Config) { c.MountRoots = []string{root} })
	mount := func(src string) func(*dsec.Spec) {
		return func(s *dsec.Spec) { s.Mounts = []dsec.HostMount{{Source: src, Target: "/mnt"}} }
	}
	for _, src := range []string{"/", "/var/run", root + "/out", root + "/../", root + "-other"} {
		_, err := w.Create(t.Context(), "proj", spec(mount(src)))
		if c := dsec.ClassOf(err); c != dsec.PermissionDenied && c != dsec.Invalid {
			t.Errorf("%s: %v", src, err)
		}
	}
	if sb := w.create(mount(root + "/data")); len(sb.Spec.Mounts) != 1 {
		t.Errorf("%+v", sb.Spec.Mounts)
	}
}

func TestLedgerRefusesThenRecovers(t *testing.T) {
	w := newWorld(t, nil)
	sb := w.create(nil)
	full := dsec.E(dsec.NoSpace, "write ledger", "", errors.New("no space left on device"))
	disarm := failpoint.Arm("node.ledger.commit", failpoint.Times(1<<30, full))
	for i := range 3 {
		_, err := w.Create(t.Context(), "proj", spec(func(s *dsec.Spec) { s.CallID = fmt.Sprint(i) }))
		wantClass(t, err, dsec.NoSpace)
	}
	if r, out := w.run(sb.ID, "echo alive"); out != "alive\n" {
		t.Fatalf("a full disk reached the sandbox: %+v", r)
	}
	existed, err := w.Delete(t.Context(), sb.ID, "d")
	if wantClass(t, err, dsec.NoSpace); existed {
		t.Fatal("a delete that is not written was confirmed")
	}
	if l := w.machine.Residue(); len(l) != 0 {
		t.Fatalf("deleting did not free: %v", l)
	}
	disarm()
	w.clock.add(time.Minute)
	w.until("all is written", func() bool { l, _ := w.List(t.Context(), Filter{}); return len(l) == 0 })
	w.empty()
	if existed, err := w.Delete(t.Context(), sb.ID, "d"); existed || err != nil {
		t.Fatal(existed, err)
	}
}

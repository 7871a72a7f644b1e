package node

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	goruntime "runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/process"
	"github.com/opendsec/dsec/runtime"
	"github.com/opendsec/dsec/runtime/runtimetest"
)

// memStore is a layer store that holds every ref but those that begin with
// "missing".
type memStore struct {
	mu     sync.Mutex
	leases map[string]bool
}

func (s *memStore) For(string) layer.Store { return s }

func (s *memStore) Acquire(ctx context.Context, lease string, refs []dsec.LayerRef) (layer.Set, error) {
	set := layer.Set{Lease: lease}
	for _, r := range refs {
		if strings.HasPrefix(string(r), "missing") {
			return layer.Set{}, dsec.E(dsec.NotFound, "acquire layer", string(r), nil)
		}
		d := layer.DigestOf([]byte(r))
		if strings.HasPrefix(string(r), "sha256:") {
			d = layer.Digest(r)
		}
		set.Layers = append(set.Layers, layer.Local{Info: layer.Info{Digest: d}})
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.leases[lease] = true
	return set, nil
}

func (s *memStore) OpenData(_ context.Context, l layer.Local) (layer.Data, error) {
	return nil, dsec.Errorf(dsec.NotFound, "open data of layer", string(l.Digest), "it has none")
}

func (s *memStore) Release(_ context.Context, lease string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.leases, lease)
	return nil
}

func (s *memStore) Leases(context.Context) ([]string, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []string
	for l := range s.leases {
		out = append(out, l)
	}
	return out, nil
}

// testClock is moved by the test.
type testClock struct {
	mu  sync.Mutex
	now time.Time
}

func (c *testClock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *testClock) add(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(d)
}

// world is a machine whose agent can be opened again.
type world struct {
	*Node
	t       *testing.T
	cfg     Config
	machine *runtimetest.Machine
	fake    *runtimetest.Fake
	store   *memStore
	clock   *testClock
}

// newWorld opens a node whose ticks are the test's: w.sweep.
func newWorld(t *testing.T, change func(*Config)) *world {
	t.Helper()
	before := goruntime.NumGoroutine()
	w := &world{t: t, machine: runtimetest.NewMachine(), store: &memStore{leases: map[string]bool{}},
		clock: &testClock{now: time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC)}}
	w.cfg = Config{ID: "nodea", Dir: t.TempDir(), Store: w.store, Tick: time.Hour, Clock: w.clock.Now, StopGrace: 50 * time.Millisecond}
	if change != nil {
		change(&w.cfg)
	}
	w.open()
	t.Cleanup(func() {
		w.shut()
		for _, id := range w.machine.Residue() { // a sandbox outlives its agent, but not the test
			f := w.machine.Open()
			_ = f.Destroy(context.Background(), id)
			_ = f.Close()
		}
		deadline := time.Now().Add(5 * time.Second)
		for goruntime.NumGoroutine() > before && time.Now().Before(deadline) {
			time.Sleep(5 * time.Millisecond)
		}
		if now := goruntime.NumGoroutine(); now > before {
			buf := make([]byte, 1<<20)
			t.Errorf("%d goroutines, %d before:\n%s", now, before, buf[:goruntime.Stack(buf, true)])
		}
	})
	return w
}

func (w *world) open() {
	w.t.Helper()
	w.fake = w.machine.Open()
	w.cfg.Metrics = NewMetrics()
	w.cfg.Runtimes = map[dsec.Tier]runtime.Runtime{dsec.TierContainer: w.fake}
	n, err := New(w.cfg)
	if err != nil {
		w.t.Fatal(err)
	}
	w.Node = n
}

func (w *world) shut() {
	if w.Node == nil {
		return
	}
	if err := w.Node.Close(); err != nil {
		w.t.Errorf("close: %v", err)
	}
	_ = w.fake.Close() // of a fake
	w.Node = nil
}

// crash loses what a killed agent loses: everything that is not in the ledger.
func (w *world) crash() {
	w.t.Helper()
	path := filepath.Join(w.cfg.Dir, "ledger.db")
	saved, err := os.ReadFile(path)
	if err != nil {
		w.t.Fatal(err)
	}
	w.shut()
	if err := os.WriteFile(path, saved, 0o600); err != nil {
		w.t.Fatal(err)
	}
	w.open()
}

func spec(change func(*dsec.Spec)) dsec.Spec {
	s := dsec.Spec{Tier: dsec.TierContainer, Image: "base:1", Layers: []dsec.LayerRef{"work:1"}, Limits: dsec.Limits{Memory: 64 << 20, Disk: 64 << 20}}
	if change != nil {
		change(&s)
	}
	return s
}

func (w *world) create(change func(*dsec.Spec)) Sandbox {
	w.t.Helper()
	sb, err := w.Create(w.t.Context(), "proj", spec(change))
	if err != nil {
		w.t.Fatalf("create: %v", err)
	}
	return sb
}

// empty fails unless nothing of any sandbox is left anywhere.
func (w *world) empty() {
	w.t.Helper()
	if ids := w.machine.Residue(); len(ids) != 0 {
		w.t.Errorf("left on the machine: %v", ids)
	}
	if l, _ := w.store.Leases(w.t.Context()); len(l) != 0 {
		w.t.Errorf("left leases: %v", l)
	}
	if l, err := w.List(w.t.Context(), Filter{}); len(l) != 0 || err != nil {
		w.t.Errorf("listed: %+v %v", l, err)
	}
	if r, err := w.ledger.live(); len(r) != 0 || err != nil {
		w.t.Errorf("in the ledger: %+v %v", r, err)
	}
	if l := w.Load(); l.Live != 0 || l.Starting != 0 || l.CPU != 0 || l.Memory != 0 || l.Disk != 0 {
		w.t.Errorf("load: %+v", l)
	}
	w.mu.RLock()
	defer w.mu.RUnlock()
	if len(w.names) != 0 || len(w.creations) != 0 || len(w.boxes) != 0 {
		w.t.Errorf("in memory: %d names, %d creations, %d boxes", len(w.names), len(w.creations), len(w.boxes))
	}
}

// until sweeps until fn is true.
func (w *world) until(what string, fn func() bool) {
	w.t.Helper()
	deadline := time.Now().Add(10 * time.Second)
	for !fn() {
		if time.Now().After(deadline) {
			w.t.Fatalf("%s: not in time", what)
		}
		w.sweep()
		time.Sleep(2 * time.Millisecond)
	}
}

func (w *world) stateOf(id dsec.SandboxID) dsec.State {
	w.t.Helper()
	sb, err := w.Get(w.t.Context(), id)
	if err != nil {
		w.t.Fatal(err)
	}
	return sb.State
}

func (w *world) run(id dsec.SandboxID, script string) (process.Result, string) {
	w.t.Helper()
	p, err := w.Exec(w.t.Context(), id, process.Spec{Argv: []string{"sh", "-c", script}})
	if err != nil {
		w.t.Fatalf("exec: %v", err)
	}
	r, err := p.Wait(w.t.Context())
	if err != nil {
		w.t.Fatalf("wait: %v", err)
	}
	head, tail, _, err := p.Kept(w.t.Context(), process.Stdout)
	if err != nil {
		w.t.Fatal(err)
	}
	return r, string(head) + string(tail)
}

// counted reads a counter.
func counted(t *testing.T, c prometheus.Metric) float64 {
	t.Helper()
	var m dto.Metric
	if err := c.Write(&m); err != nil {
		t.Fatal(err)
	}
	return m.GetCounter().GetValue()
}

func wantClass(t *testing.T, err error, c dsec.Class) {
	t.Helper()
	if dsec.ClassOf(err) != c {
		t.Fatalf("error %v of class %q, want %q", err, dsec.ClassOf(err), c)
	}
}

func TestCreateFillsDefaultsAndTellsSteps(t *testing.T) {
	w := newWorld(t, nil)
	sb := w.create(func(s *dsec.Spec) { s.Limits = dsec.Limits{} })
	l := sb.Spec.Limits
	if l.CPU != 1 || l.Memory != 1<<30 || l.Pids != 512 || l.Disk != 4<<30 || l.Output != 64<<20 || l.CPUWeight != 100 {
		t.Errorf("limits %+v", l)
	}
	if sb.Spec.Lifetimes.Idle != time.Hour || sb.Spec.Lifetimes.Lifetime != 0 || sb.Spec.Lifetimes.Retention != time.Hour || !sb.Expires.IsZero() {
		t.Errorf("lifetimes %+v", sb.Spec.Lifetimes)
	}
	if sb.Spec.Network != dsec.NetworkNone || sb.Spec.Profile != "build" || sb.State != dsec.Running || sb.Starts != 1 || len(sb.Digests) != 2 {
		t.Errorf("%+v", sb)
	}
	var names []string
	for _, s := range sb.Steps {
		names = append(names, s.Name)
	}
	if !slices.Equal(names, []string{"ledger", "queue", "layers", "root", "start", "ready"}) {
		t.Errorf("steps %v", names)
	}
	if id, node, err := dsec.ParseSandboxID(string(sb.ID)); err != nil || node != "nodea" || sb.Spec.Hostname != string(id) {
		t.Errorf("id %s of %s, host %s: %v", id, node, sb.Spec.Hostname, err)
	}
	if existed, err := w.Delete(t.Context(), sb.ID, ""); !existed || err != nil {
		t.Fatal(existed, err)
	}
	w.empty()
	got, err := w.Get(t.Context(), sb.ID)
	if err != nil || got.State != dsec.Deleted || got.Result.Cause != dsec.CauseCompleted || got.Result.Usage.Starts != 1 {
		t.Fatalf("record: %+v %v", got, err)
	}
}

func TestExecAndRecord(t *testing.T) {
	w := newWorld(t, nil)
	sb := w.create(nil)
	if r, out := w.run(sb.ID, "echo hello; exit 3"); r.ExitCode != 3 || out != "hello\n" {
		t.Fatalf("%+v %q", r, out)
	}
	w.until("the end is noted", func() bool {
		r, err := w.Record(t.Context(), sb.ID)
		return err == nil && len(r.Outputs) == 1
	})
	p, err := w.Exec(t.Context(), sb.ID, process.Spec{Argv: []string{"sh", "-c", "echo partial; sleep 300"}})
	if err != nil {
		t.Fatal(err)
	}
	w.until("it has written", func() bool {
		head, _, _, err := p.Kept(t.Context(), process.Stdout)
		return err == nil && len(head) > 0
	})
	if _, err := w.Delete(t.Context(), sb.ID, ""); err != nil {
		t.Fatal(err)
	}
	r, err := w.Record(t.Context(), sb.ID)
	if err != nil || len(r.Outputs) != 2 || string(r.Outputs[0].Stdout) != "hello\n" || r.Outputs[0].Code != 3 || string(r.Outputs[1].Stdout) != "partial\n" {
		t.Fatalf("%+v %v", r.Outputs, err)
	}
	var types []string
	for i, e := range r.Events {
		if e.Seq != uint64(i+1) {
			t.Errorf("event %d has number %d", i, e.Seq)
		}
		types = append(types, fmt.Sprint(e.Type, e.To))
	}
	want := "statecreating staterunning exec_started exec_exited exec_started statestopping exec_exited statestopped statedeleted"
	if got := strings.Join(types, " "); got != want {
		t.Errorf("events %s\nwant %s", got, want)
	}
	w.empty()
}

package container

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/image"
	"github.com/opendsec/dsec/internal/accounts"
	"github.com/opendsec/dsec/internal/cgroup"
	"github.com/opendsec/dsec/internal/diskpool"
	"github.com/opendsec/dsec/internal/embedded"
	"github.com/opendsec/dsec/internal/hold"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/netpolicy/bpf"
	"github.com/opendsec/dsec/netpolicy/veth"
	"github.com/opendsec/dsec/process"
	"github.com/opendsec/dsec/rootfs"
	"github.com/opendsec/dsec/runtime"
	"github.com/opendsec/dsec/runtime/runtimetest"
	"github.com/opendsec/dsec/runtime/runtimetest/layertest"
)

func TestMain(m *testing.M) {
	code := m.Run()
	layertest.Remove()
	os.Exit(code)
}

// world is a machine's worth of what a Runtime needs, of its own.
type world struct {
	dir     string
	name    string // of control groups
	hold    *hold.Client
	groups  *cgroup.Root
	mounts  *rootfs.Mounts
	disks   diskpool.Pool
	r       *Runtime
	plan    string
	uidBase uint32
	shells  int
	disk    string // mechanism of the pool; "": what is found
	linked  bool   // sandboxes may have a network, kept by the hold as the agent's is
	network *veth.Network
	gate    *bpf.Gate // of it
}

var worldsMade struct {
	sync.Mutex
	n int
}

// newWorld starts a hold and opens everything; what is left at the end of the
// test is an error.
func newWorld(t testing.TB, options ...func(*world)) *world {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("sandboxes need root and this test runs without it")
	}
	worldsMade.Lock()
	worldsMade.n++
	w := &world{dir: t.TempDir(), name: fmt.Sprintf("dsect%d.%d", os.Getpid(), worldsMade.n), uidBase: 1<<28 + uint32(worldsMade.n)*1000*accounts.IDs}
	worldsMade.Unlock()
	for _, o := range options {
		o(w)
	}
	t.Cleanup(func() { w.destroy(t) })
	w.open(t)
	return w
}

// attachedPlan forces the mount plan of older kernels.
func attachedPlan(w *world) { w.plan = "attached" }

// loopDisks has each disk in a file of its own, which cannot be copied in a moment.
func loopDisks(w *world) { w.disk = diskpool.LoopExt4 }

// readyShells has sandboxes made from shells that were made ahead.
func readyShells(w *world) { w.shells = 2 }

// linkedShells is readyShells of sandboxes that have a network.
func linkedShells(w *world) { w.shells, w.linked = 2, true }

// ready waits until there are as many as there should be.
func (w *world) ready(t testing.TB) {
	t.Helper()
	eventually(t, "shells are ready", func() bool {
		w.r.shells.mu.Lock()
		defer w.r.shells.mu.Unlock()
		return len(w.r.shells.ready) == w.shells
	})
}

// rest removes the shells that are ready and calls f.
func (w *world) rest(t testing.TB, f func()) {
	t.Helper()
	if w.shells == 0 {
		f()
		return
	}
	must(t, w.r.Close())
	defer w.openRuntime(t)
	f()
}

func (w *world) open(t testing.TB) {
	t.Helper()
	ctx := context.Background()
	var err error
	w.groups, err = cgroup.Open(w.name)
	must(t, err)
	binary, err := embedded.Hold() // static, so that its file helper starts in any root
	must(t, err)
	defer binary.Close()
	w.hold, err = hold.Ensure(ctx, hold.Options{Socket: filepath.Join(w.dir, "hold"), Binary: binary, Log: filepath.Join(w.dir, "hold.log")})
	must(t, err)
	o := rootfs.Options{Keeper: w.hold, Linger: time.Hour}
	if w.plan == "attached" {
		o.Plan, err = rootfs.Attached(ctx, w.hold)
		must(t, err)
	}
	w.mounts, err = rootfs.Open(ctx, o)
	must(t, err)
	w.disks, err = diskpool.Open(ctx, diskpool.Options{Dir: filepath.Join(w.dir, "pool"), Size: 2 << 30, Mechanism: w.disk, Keeper: w.mounts.Keeper()})
	must(t, err)
	if w.linked {
		w.gate, err = bpf.Open(ctx, w.hold, w.netName())
		must(t, err)
		w.network, err = veth.Open(ctx, veth.Config{Gate: w.gate, Name: w.netName(), Node: newNetNS(t), DNS: []netip.Addr{}, Keeper: w.hold})
		must(t, err)
	}
	w.openRuntime(t)
}

// netName is that of the world, as short as the name of a network has to be.
func (w *world) netName() string {
	var pid, n int64
	if _, err := fmt.Sscanf(w.name, "dsect%d.%d", &pid, &n); err != nil {
		panic(err)
	}
	return strconv.FormatInt(pid, 36) + "x" + strconv.FormatInt(n, 36)
}

func (w *world) config() Config {
	c := Config{Dir: filepath.Join(w.dir, "sandboxes"), UIDBase: w.uidBase, UIDRanges: 1000, Shells: w.shells, Hold: w.hold, Cgroups: w.groups,
		Disks: w.disks, Mounts: w.mounts, Log: slog.New(slog.DiscardHandler)}
	if w.linked {
		c.Network = w.network
	}
	return c
}

func (w *world) openRuntime(t testing.TB) {
	t.Helper()
	var err error
	w.r, err = Open(context.Background(), w.config())
	must(t, err)
}

// close lets go of everything, as the agent does when it ends.
func (w *world) close(t testing.TB) {
	t.Helper()
	must(t, w.r.Close())
	if w.linked {
		must(t, w.network.Close())
		must(t, w.gate.Close())
	}
	must(t, w.mounts.Close())
	must(t, w.disks.Close())
	must(t, w.hold.Close())
	must(t, w.groups.Close())
}

// destroy takes down what there is, also of a world whose opening failed.
func (w *world) destroy(t testing.TB) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	note := func(err error) {
		if err != nil {
			t.Error(err)
		}
	}
	if w.r != nil {
		list, err := w.r.List(ctx)
		note(err)
		for _, s := range list {
			note(w.r.Destroy(ctx, s.ID))
		}
		w.wantNothing(t)
		note(w.r.Close())
	}
	if t.Failed() {
		log, _ := os.ReadFile(filepath.Join(w.dir, "hold.log"))
		t.Logf("hold: %s", tail(log, 2000))
	}
	if w.network != nil {
		note(w.network.Remove(ctx))
		note(w.gate.Close())
	}
	if w.mounts != nil {
		note(w.mounts.Close())
	}
	if w.disks != nil {
		note(w.disks.Close())
	}
	if w.hold != nil {
		note(w.hold.Shutdown(ctx))
	}
	if w.groups != nil {
		note(w.groups.RemoveAll(ctx))
	}
}

func tail(b []byte, n int) []byte { return b[max(0, len(b)-n):] }

// wantNothing checks that no trace of any sandbox is left.
func (w *world) wantNothing(t testing.TB) {
	t.Helper()
	w.rest(t, func() { w.nothingLeft(t) })
}

func (w *world) nothingLeft(t testing.TB) {
	t.Helper()
	ctx := context.Background()
	if names, err := w.groups.List(); err != nil || len(names) > 0 {
		t.Errorf("control groups left: %v %v", names, err)
	}
	if names, err := w.disks.List(ctx); err != nil || len(names) > 0 {
		t.Errorf("disks left: %v %v", names, err)
	}
	if known, err := w.hold.List(ctx); err != nil || len(known) > 0 {
		t.Errorf("the hold knows %v %v", known, err)
	}
	if entries, err := os.ReadDir(filepath.Join(w.dir, "sandboxes")); err != nil || len(entries) > 0 {
		t.Errorf("state left: %v %v", entries, err)
	}
	if w.linked {
		router, err := w.network.Router()
		must(t, err)
		defer router.Close()
		eventually(t, "no link is left", func() bool { return linksIn(t, router, "v") == 0 })
	}
	if n := w.r.uids.InUse(); n > 0 {
		t.Errorf("%d uid ranges in use", n)
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// request is one for an idle sandbox, changed by f.
func request(t testing.TB, f ...func(*runtime.Request)) runtime.Request {
	id := dsec.NewSandboxID("t")
	r := runtime.Request{ID: id, Spec: dsec.Spec{Tier: dsec.TierContainer, Image: "base:test", Network: dsec.NetworkNone,
		Limits: dsec.Limits{CPU: 1, CPUWeight: 100, Memory: 256 << 20, Pids: 128, Disk: 64 << 20, Output: 64 << 20}, OOM: dsec.OOMExec},
		Layers: layer.Set{Lease: string(id), Layers: []layer.Local{layertest.Base(t)}, Config: image.Config{Env: []string{"FROM=image"}}}}
	for _, g := range f {
		g(&r)
	}
	return r
}

func (w *world) create(t testing.TB, f ...func(*runtime.Request)) dsec.SandboxID {
	t.Helper()
	r := request(t, f...)
	_, err := w.r.Create(context.Background(), r)
	must(t, err)
	return r.ID
}

// run runs a command to its end and releases it.
func (w *world) run(t testing.TB, id dsec.SandboxID, s process.Spec) runtimetest.Outcome {
	t.Helper()
	o, err := w.try(id, s)
	must(t, err)
	return o
}

func (w *world) try(id dsec.SandboxID, s process.Spec) (runtimetest.Outcome, error) {
	return runtimetest.Try(w.r, id, s)
}

func (w *world) sh(t testing.TB, id dsec.SandboxID, script string) runtimetest.Outcome {
	t.Helper()
	return w.run(t, id, runtimetest.Shell(script))
}

// want runs a script as root and compares what it prints.
func (w *world) want(t testing.TB, id dsec.SandboxID, script, want string) {
	t.Helper()
	o := w.sh(t, id, script)
	if o.Stdout != want || o.ExitCode != 0 {
		t.Errorf("%s\n got %q (%d) %s\nwant %q", script, o.Stdout, o.ExitCode, o.Stderr, want)
	}
}

// eventually polls until ok, for at most 10 s.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(10 * time.Second)
	for !ok() {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("not within 10 s: %s", what)
		}
	}
}

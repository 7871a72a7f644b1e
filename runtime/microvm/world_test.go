package microvm

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/e2e/vm"
	"github.com/opendsec/dsec/image"
	"github.com/opendsec/dsec/internal/cgroup"
	"github.com/opendsec/dsec/internal/diskpool"
	"github.com/opendsec/dsec/internal/embedded"
	"github.com/opendsec/dsec/internal/hold"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/netpolicy/bpf"
	"github.com/opendsec/dsec/netpolicy/veth"
	"github.com/opendsec/dsec/rootfs"
	"github.com/opendsec/dsec/runtime"
	"github.com/opendsec/dsec/runtime/microvm/boot"
	"github.com/opendsec/dsec/runtime/microvm/qemu"
	"github.com/opendsec/dsec/runtime/microvm/vmm"
	"github.com/opendsec/dsec/runtime/runtimetest"
	"github.com/opendsec/dsec/runtime/runtimetest/layertest"
)

// testUID is where the users of QEMUs begin: far from those of other tests.
const testUID = 0x6d000000

func TestMain(m *testing.M) {
	code := m.Run()
	if kit.dir != "" {
		_ = os.RemoveAll(kit.dir)
	}
	os.Exit(code)
}

// kit is what all tests share: a kernel, an initramfs, a layer, and the directory of templates.
var kit struct {
	sync.Once
	dir, cache        string
	kernel, initramfs vmm.File
	base              layer.Local
	err               error
}

func makeKit() error {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	var err error
	if kit.dir, err = os.MkdirTemp("", "dsec-microvm-test-"); err != nil {
		return err
	}
	if kit.cache, err = filepath.Abs("../../.cache/vm"); err != nil {
		return err
	}
	k, err := vm.Fetch(ctx, kit.cache) // the package of the kernel comes through the machine's apt
	if err != nil {
		return err
	}
	k.Close()
	agent, err := embedded.Guest()
	if err != nil {
		return err
	}
	built, err := boot.Build(ctx, boot.Config{Cache: kit.cache, Init: agent, Modules: Modules})
	if err != nil {
		return err
	}
	if kit.kernel, err = FileOf(ctx, built.Image); err != nil {
		return err
	}
	if kit.initramfs, err = FileOf(ctx, built.Initramfs); err != nil {
		return err
	}
	kit.base, err = layertest.Build(filepath.Join(kit.dir, "base"), func(dir string) error {
		return errors.Join(layertest.Busybox(dir), os.WriteFile(filepath.Join(dir, "etc/machine-id"), []byte("\n"), 0o644))
	})
	return err
}

// world is a machine's worth of what a Runtime needs, of its own.
type world struct {
	dir, name string
	templates string
	hold      *hold.Client
	groups    *cgroup.Root
	mounts    *rootfs.Mounts
	disks     diskpool.Pool
	driver    *qemu.Driver
	r         *Runtime
	linked    bool
	apart     bool             // it has templates of its own, as another node has
	gone      bool             // it was destroyed before the end of the test
	mortal    bool             // its guests have an agent that can be killed
	pool      int64            // bytes of the disk pool; 0: 4 GiB
	machinery func(*Machinery) // changes what machines begin with
	devices   rootfs.Devices   // of layers that are not whole
	complete  func(context.Context, layer.Local) error
	network   *veth.Network
	gate      *bpf.Gate
}

var worlds struct {
	sync.Mutex
	n int
}

func newWorld(t testing.TB, options ...func(*world)) *world {
	t.Helper()
	if _, err := exec.LookPath("qemu-system-x86_64"); err != nil {
		t.Skipf("%v (PATH=%s)", err, os.Getenv("PATH"))
	}
	if os.Geteuid() != 0 {
		t.Skip("sandboxes need root and this test runs without it")
	}
	kit.Do(func() { kit.err = makeKit() })
	must(t, kit.err)
	worlds.Lock()
	worlds.n++
	w := &world{dir: t.TempDir(), name: fmt.Sprintf("dsecm%d.%d", os.Getpid(), worlds.n)}
	worlds.Unlock()
	for _, o := range options {
		o(w)
	}
	t.Cleanup(func() { w.destroy(t) })
	w.open(t)
	return w
}

func linked(w *world) { w.linked = true }
func mortal(w *world) { w.mortal = true }
func tight(w *world)  { w.pool = 300 << 20 }

func apart(w *world) { w.apart = true }

func (w *world) open(t testing.TB) {
	dir := kit.dir
	if w.apart {
		dir = w.dir
	}
	w.openIn(t, dir)
}

// openIn opens a world with templates of that directory.
func (w *world) openIn(t testing.TB, templates string) {
	t.Helper()
	w.templates = filepath.Join(templates, "templates")
	if w.pool == 0 {
		w.pool = 4 << 30
	}
	ctx := context.Background()
	var err error
	w.groups, err = cgroup.Open(w.name)
	must(t, err)
	binary, err := embedded.Hold()
	must(t, err)
	defer func() { _ = binary.Close() }()
	w.hold, err = hold.Ensure(ctx, hold.Options{Socket: filepath.Join(w.dir, "hold"), Binary: binary, Log: filepath.Join(w.dir, "hold.log")})
	must(t, err)
	w.mounts, err = rootfs.Open(ctx, rootfs.Options{Keeper: w.hold, Linger: time.Hour})
	must(t, err)
	w.disks, err = diskpool.Open(ctx, diskpool.Options{Dir: filepath.Join(w.dir, "pool"), Size: w.pool, Keeper: w.mounts.Keeper()})
	must(t, err)
	if w.linked {
		w.gate, err = bpf.Open(ctx, w.hold, w.netName())
		must(t, err)
		w.network, err = veth.Open(ctx, veth.Config{Gate: w.gate, Name: w.netName(), Node: newNode(t), DNS: []netip.Addr{}, Keeper: w.hold})
		must(t, err)
	}
	w.openRuntime(t)
}

// netName is that of the world, as short as the name of a network has to be.
func (w *world) netName() string {
	pid, n, _ := strings.Cut(strings.TrimPrefix(w.name, "dsecm"), ".")
	p, _ := strconv.ParseInt(pid, 10, 64)
	return strconv.FormatInt(p, 36) + "m" + n
}

// newNode is a network namespace that stands for the machine's own.
func newNode(t testing.TB) *os.File {
	t.Helper()
	ns, err := newNetNS()
	must(t, err)
	t.Cleanup(func() { _ = ns.Close() })
	return ns
}

func (w *world) openRuntime(t testing.TB) {
	t.Helper()
	var err error
	uid := uint32(testUID)
	if w.apart { // two drivers do not know of each other's
		uid += 1 << 16
	}
	w.driver, err = qemu.New(context.Background(), qemu.Config{Dir: w.templates, UID: uid,
		Keep: &qemu.Keep{Hold: w.hold, Place: Place(w.groups)}})
	must(t, err)
	c := Config{Dir: filepath.Join(w.dir, "sandboxes"), Hold: w.hold, Cgroups: w.groups, Disks: w.disks, Log: slog.New(slog.NewTextHandler(t.Output(), nil)),
		Devices: w.devices, Complete: w.complete, Open: func(context.Context) (Machinery, error) {
			m := Machinery{VMM: w.driver, Kernel: kit.kernel, Initramfs: kit.initramfs}
			if w.mortal {
				m.Initramfs = mortalInitramfs(t)
			}
			if w.machinery != nil {
				w.machinery(&m)
			}
			return m, nil
		}}
	if w.linked {
		c.Network = w.network
	}
	w.r, err = Open(context.Background(), c)
	must(t, err)
}

// mortalInitramfs has an agent that can be killed.
func mortalInitramfs(t testing.TB) vmm.File {
	t.Helper()
	program := filepath.Join(t.TempDir(), "mortal")
	build := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w", "-o", program, "./testdata/mortal")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	init, err := os.ReadFile(program)
	must(t, err)
	agent, err := embedded.Guest()
	must(t, err)
	built, err := boot.Build(t.Context(), boot.Config{Cache: kit.cache, Init: init, Modules: Modules, Files: []boot.File{{Name: "agent", Mode: 0o755, Content: agent}}})
	must(t, err)
	f, err := FileOf(t.Context(), built.Initramfs)
	must(t, err)
	return f
}

// close lets go of everything, as an agent does that ends.
func (w *world) close(t testing.TB) {
	t.Helper()
	must(t, w.r.Close())
	w.driver.Close()
	if w.linked {
		must(t, w.network.Close())
		must(t, w.gate.Close())
	}
	must(t, w.disks.Close())
	must(t, w.mounts.Close())
	must(t, w.hold.Close())
	must(t, w.groups.Close())
}

// reopen is another agent over the same machine.
func (w *world) reopen(t testing.TB) {
	t.Helper()
	must(t, w.r.Close())
	w.driver.Close()
	w.openRuntime(t)
}

// destroy takes down what there is, also of a world whose opening failed.
func (w *world) destroy(t testing.TB) {
	if w.gone {
		return
	}
	w.gone = true
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
		w.nothingLeft(t)
		note(w.r.Close())
		w.driver.Close()
	}
	if w.network != nil {
		note(w.network.Remove(ctx))
		note(w.gate.Close())
	}
	if w.disks != nil {
		note(w.disks.Close())
	}
	if w.mounts != nil {
		note(w.mounts.Close())
	}
	if w.hold != nil {
		note(w.hold.Shutdown(ctx))
	}
	if w.groups != nil {
		note(w.groups.RemoveAll(ctx))
	}
}

// nothingLeft checks that no trace of any sandbox is left.
func (w *world) nothingLeft(t testing.TB) {
	t.Helper()
	ctx := context.Background()
	if names, err := w.groups.List(); err != nil || len(names) > 0 {
		t.Errorf("control groups left: %v %v", names, err)
	}
	if names, err := w.disks.List(ctx); err != nil || len(names) > 0 {
		t.Errorf("disks left: %v %v", names, err)
	}
	if names, err := w.driver.Names(ctx); err != nil || len(names) > 0 {
		t.Errorf("machines left: %v %v", names, err)
	}
	for _, prefix := range []string{"vm/", "vm-net/"} {
		if names, err := w.hold.Names(ctx, prefix); err != nil || len(names) > 0 {
			t.Errorf("the hold keeps %v %v", names, err)
		}
	}
	if all, err := w.hold.Plains(ctx, ""); err != nil || len(all) > 0 {
		t.Errorf("processes left: %v %v", all, err)
	}
	if entries, err := os.ReadDir(filepath.Join(w.dir, "sandboxes")); err != nil || len(entries) > 0 {
		t.Errorf("state left: %v %v", entries, err)
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// request is one for an idle sandbox, changed by f.
func request(f ...func(*runtime.Request)) runtime.Request {
	id := dsec.NewSandboxID("t")
	r := runtime.Request{ID: id, Spec: dsec.Spec{Tier: dsec.TierMicroVM, Image: "base:test", Network: dsec.NetworkNone,
		Limits: dsec.Limits{CPU: 1, CPUWeight: 100, Memory: 128 << 20, Pids: 128, Disk: 64 << 20, Output: 64 << 20}, OOM: dsec.OOMExec},
		Layers: layer.Set{Lease: string(id), Layers: []layer.Local{kit.base}, Config: image.Config{Env: []string{"FROM=image"}}}}
	for _, g := range f {
		g(&r)
	}
	return r
}

func (w *world) create(t testing.TB, f ...func(*runtime.Request)) dsec.SandboxID {
	t.Helper()
	r := request(f...)
	steps, err := w.r.Create(context.Background(), r)
	must(t, err)
	t.Log(steps)
	return r.ID
}

// run runs a script to its end.
func (w *world) run(t testing.TB, id dsec.SandboxID, script string) runtimetest.Outcome {
	t.Helper()
	o, err := runtimetest.Try(w.r, id, runtimetest.Shell(script))
	must(t, err)
	return o
}

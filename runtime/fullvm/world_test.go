package fullvm

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"fmt"
	"image"
	"image/png"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	dsecimage "github.com/opendsec/dsec/image"
	"github.com/opendsec/dsec/internal/cgroup"
	"github.com/opendsec/dsec/internal/diskimage"
	"github.com/opendsec/dsec/internal/diskpool"
	"github.com/opendsec/dsec/internal/embedded"
	"github.com/opendsec/dsec/internal/hold"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/process"
	"github.com/opendsec/dsec/rootfs"
	"github.com/opendsec/dsec/runtime"
	"github.com/opendsec/dsec/runtime/microvm/qemu"
	"github.com/opendsec/dsec/runtime/runtimetest"
)

// testUID is the first user of machines of these tests.
const testUID = 1<<27 + 5000

func TestMain(m *testing.M) {
	if text := os.Getenv("DSEC_TEST_AGENT"); text != "" {
		agent(text)
	}
	code := m.Run()
	for _, dir := range []string{theWorld.dir, smallDisk.dir} {
		if dir != "" {
			_ = os.RemoveAll(dir)
		}
	}
	os.Exit(code)
}

// world is a machine's worth of what a Runtime needs, of its own.
type world struct {
	dir    string
	name   string
	hold   *hold.Client
	groups *cgroup.Root
	mounts *rootfs.Mounts
	disks  diskpool.Pool
	driver *qemu.Driver
	r      *Runtime

	agentTime time.Duration // 0: the default one
	pool      int64         // bytes of the disk pool; 0: 8 GiB
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func newWorld(t testing.TB, options ...func(*world)) *world {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("machines need root and this test runs without it")
	}
	w := &world{dir: t.TempDir(), name: fmt.Sprintf("dsecf%d.%d", os.Getpid(), time.Now().UnixNano()%1e6)}
	for _, o := range options {
		o(w)
	}
	t.Cleanup(func() { w.destroy(t) })
	w.open(t)
	return w
}

func (w *world) open(t testing.TB) {
	t.Helper()
	ctx := context.Background()
	var err error
	w.groups, err = cgroup.Open(w.name)
	must(t, err)
	binary, err := embedded.Hold()
	must(t, err)
	defer binary.Close()
	w.hold, err = hold.Ensure(ctx, hold.Options{Socket: filepath.Join(w.dir, "hold"), Binary: binary, Log: filepath.Join(w.dir, "hold.log")})
	must(t, err)
	w.mounts, err = rootfs.Open(ctx, rootfs.Options{Keeper: w.hold, Linger: time.Hour})
	must(t, err)
	w.disks, err = diskpool.Open(ctx, diskpool.Options{Dir: filepath.Join(w.dir, "pool"), Size: cmp.Or(w.pool, 8<<30), Keeper: w.mounts.Keeper()})
	must(t, err)
	w.openRuntime(t)
}

func (w *world) openRuntime(t testing.TB) {
	t.Helper()
	ctx := context.Background()
	var err error
	w.driver, err = qemu.New(ctx, qemu.Config{Dir: filepath.Join(w.dir, "vm"), UID: testUID, UIDs: 100, Keep: &qemu.Keep{Hold: w.hold, Place: Place(w.groups)}})
	must(t, err)
	w.r, err = Open(ctx, Config{Dir: filepath.Join(w.dir, "sandboxes"), Machines: w.driver, Groups: w.groups, Disks: w.disks, Mounts: w.mounts, Lost: w.hold.Done(), Since: w.hold.Info().Started, AgentTime: w.agentTime, Log: slog.New(slog.DiscardHandler)})
	must(t, err)
}

// close lets go of everything, as the agent does when it ends.
func (w *world) close(t testing.TB) {
	t.Helper()
	must(t, w.r.Close())
	w.driver.Close()
	must(t, w.mounts.Close())
	must(t, w.disks.Close())
	must(t, w.hold.Close())
	must(t, w.groups.Close())
}

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
		t.Logf("hold: %s", log[max(0, len(log)-2000):])
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

// wantNothing checks that no trace of any sandbox is left.
func (w *world) wantNothing(t testing.TB) {
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
	if known, err := w.hold.Plains(ctx, ""); err != nil || len(known) > 0 {
		t.Errorf("the hold knows %v %v", known, err)
	}
	if entries, err := os.ReadDir(filepath.Join(w.dir, "sandboxes")); err != nil || len(entries) > 0 {
		t.Errorf("state left: %v %v", entries, err)
	}
}

var theWorld struct {
	sync.Mutex
	dir  string
	disk layer.Local
}

// debianDisk is the layer of the demo's disk image, made once for this process; the image is made once
// for this tree.
func debianDisk(t testing.TB) layer.Local {
	t.Helper()
	theWorld.Lock()
	defer theWorld.Unlock()
	if theWorld.dir != "" {
		return theWorld.disk
	}
	name, err := filepath.Abs("../../.cache/demo/disk.qcow2")
	must(t, err)
	out, err := exec.Command("../../demo/disk.sh", name).CombinedOutput()
	if err != nil {
		t.Fatalf("demo/disk.sh: %v\n%s", err, out)
	}
	dir, err := os.MkdirTemp("", "dsec-fullvm-test-")
	must(t, err)
	f, err := os.Open(name)
	must(t, err)
	defer f.Close()
	s, err := diskimage.Read(f)
	must(t, err)
	m := diskimage.New(s.Size)
	m.Agent = true
	theWorld.disk = buildLayer(t, dir, m, s)
	theWorld.dir = dir
	return theWorld.disk
}

// buildLayer makes the two files of a layer in the way that an upload does.
func buildLayer(t testing.TB, dir string, m diskimage.Manifest, disk diskimage.Source) layer.Local {
	t.Helper()
	tar, err := os.Create(filepath.Join(dir, "tar"))
	must(t, err)
	defer os.Remove(tar.Name())
	must(t, diskimage.WriteTar(tar, m, disk))
	must(t, tar.Close())
	return layerOf(t, dir, "tar:"+tar.Name())
}

func layerOf(t testing.TB, dir, source string) layer.Local {
	t.Helper()
	var f dsecimage.Files
	var err error
	f.Meta, err = os.Create(filepath.Join(dir, "meta"))
	must(t, err)
	defer f.Meta.Close()
	f.Data, err = os.Create(filepath.Join(dir, "data"))
	must(t, err)
	defer f.Data.Close()
	loc, err := dsecimage.Locate(source)
	must(t, err)
	res, err := dsecimage.Convert(context.Background(), loc, f, dsecimage.Options{})
	must(t, err)
	l := layer.Local{Info: layer.Info{Digest: layer.Digest(fmt.Sprintf("sha256:%x", sha256.Sum256([]byte(dir))))}, Meta: f.Meta.Name(), Data: f.Data.Name()}
	if res.DataSize == 0 {
		l.Data = ""
	}
	return l
}

// request is one for a machine of a disk image.
func request(l layer.Local, f ...func(*runtime.Request)) runtime.Request {
	id := dsec.NewSandboxID("t")
	r := runtime.Request{ID: id, Spec: dsec.Spec{Tier: dsec.TierFullVM, Image: "debian:disk", Network: dsec.NetworkNone, Profile: "build", OOM: dsec.OOMExec,
		Limits: dsec.Limits{CPU: 2, CPUWeight: 100, Memory: 384 << 20, Pids: 128, Disk: 2 << 30, Output: 8 << 20}},
		Layers: layer.Set{Lease: string(id), Layers: []layer.Local{l}}}
	for _, g := range f {
		g(&r)
	}
	return r
}

// box is one sandbox of a test.
type box struct {
	*world
	t  testing.TB
	id dsec.SandboxID
}

func (w *world) boot(t testing.TB, f ...func(*runtime.Request)) *box {
	t.Helper()
	return w.create(t, request(debianDisk(t), f...))
}

func (w *world) create(t testing.TB, req runtime.Request) *box {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 4*time.Minute)
	defer cancel()
	began := time.Now()
	steps, err := w.r.Create(ctx, req)
	if err != nil {
		t.Fatalf("%v (%v)", err, steps)
	}
	t.Logf("it took %v from nothing to where it runs", time.Since(began).Round(100*time.Millisecond))
	return &box{w, t, req.ID}
}

func (b *box) ctx() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	b.t.Cleanup(cancel)
	return ctx
}

// run runs a shell command and returns what it wrote.
func (b *box) run(script string) string {
	b.t.Helper()
	out, res, err := b.try(script)
	if err != nil || res.ExitCode != 0 {
		b.t.Fatalf("%s: %+v %v\n%s", script, res, err, out)
	}
	return out
}

func (b *box) try(script string) (string, process.Result, error) {
	o, err := runtimetest.Try(b.r, b.id, runtimetest.Shell(script))
	return o.Stdout, o.Result, err
}

// shown is what the program on the screen says that it shows.
func (b *box) shown() string { return strings.TrimSpace(b.run("cat /run/screen")) }

// until waits for what the program says.
func (b *box) until(part string) {
	b.t.Helper()
	for end := time.Now().Add(30 * time.Second); ; {
		out, _, err := b.try("cat /run/screen")
		if err == nil && strings.Contains(out, part) {
			return
		}
		if time.Now().After(end) {
			b.t.Fatalf("%q is not on the screen, but %q, %v", part, out, err)
		}
	}
}

// picture of the screen, decoded.
func (b *box) picture(region dsec.Region) image.Image {
	b.t.Helper()
	p, err := b.r.Screenshot(b.ctx(), b.id, region)
	must(b.t, err)
	img, err := png.Decode(bytes.NewReader(p.PNG))
	must(b.t, err)
	if img.Bounds().Dx() != p.Region.Width || img.Bounds().Dy() != p.Region.Height {
		b.t.Fatalf("a picture of %v is %v", p.Region, img.Bounds())
	}
	return img
}

// colors counts pixels of a color in a picture.
func colors(img image.Image, want uint32) (n int) {
	for y := img.Bounds().Min.Y; y < img.Bounds().Max.Y; y++ {
		for x := img.Bounds().Min.X; x < img.Bounds().Max.X; x++ {
			if r, g, b, _ := img.At(x, y).RGBA(); r>>8<<16|g>>8<<8|b>>8 == want {
				n++
			}
		}
	}
	return n
}

// see waits until a part of the screen has at least so many pixels of a color.
func (b *box) see(region dsec.Region, color uint32, least int) image.Image {
	b.t.Helper()
	for end := time.Now().Add(30 * time.Second); ; {
		img := b.picture(region)
		n := colors(img, color)
		if n >= least {
			return img
		}
		if time.Now().After(end) {
			b.t.Fatalf("%d pixels of %06x in %v, want %d", n, color, region, least)
		}
	}
}

func (b *box) act(a ...dsec.ScreenAction) {
	b.t.Helper()
	must(b.t, b.r.Act(b.ctx(), b.id, a))
}

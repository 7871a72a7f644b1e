package function

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/image"
	"github.com/opendsec/dsec/internal/cgroup"
	"github.com/opendsec/dsec/internal/diskpool"
	"github.com/opendsec/dsec/internal/embedded"
	"github.com/opendsec/dsec/internal/hold"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/rootfs"
	"github.com/opendsec/dsec/runtime"
	"github.com/opendsec/dsec/runtime/container"
	"github.com/opendsec/dsec/runtime/runtimetest/layertest"
)

func TestMain(m *testing.M) {
	code := m.Run()
	if base.dir != "" {
		_ = os.RemoveAll(base.dir)
	}
	os.Exit(code)
}

// world is a real machine of the container tier with an engine on it.
type world struct {
	dir    string
	hold   *hold.Client
	groups *cgroup.Root
	mounts *rootfs.Mounts
	disks  diskpool.Pool
	tier   *container.Runtime
	source *source
	e      *Engine
}

// source gives every call the same layer, and counts what is held.
type source struct {
	l           layer.Local
	mu          sync.Mutex
	held        map[string]bool
	live, asked atomic.Int64
	most        int64 // containers that it admits; 0: any number
	tag         string
}

func (s *source) Acquire(_ context.Context, _, lease string, refs []dsec.LayerRef) (layer.Set, error) {
	if refs[0] == "missing" {
		return layer.Set{}, dsec.E(dsec.NotFound, "find layer", "missing", nil)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.held[lease] = true
	return layer.Set{Lease: lease, Layers: []layer.Local{s.l}, Config: image.Config{Env: []string{"FROM=image"}}}, nil
}

func (s *source) Release(_ context.Context, lease string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.held, lease)
	return nil
}

func (s *source) Admit(dsec.Limits) (func(), error) {
	s.asked.Add(1)
	if n := s.live.Add(1); s.most > 0 && n > s.most {
		s.live.Add(-1)
		return nil, dsec.Errorf(dsec.ResourceExhausted, "admit", "", "full")
	}
	return sync.OnceFunc(func() { s.live.Add(-1) }), nil
}

var worlds atomic.Int64

func newWorld(t testing.TB, change ...func(*Config)) *world {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("containers need root and this test runs as uid", os.Geteuid())
	}
	w := &world{dir: t.TempDir(), source: &source{l: baseLayer(t), held: map[string]bool{}}}
	t.Cleanup(func() { w.close(t) })
	ctx := context.Background()
	var err error
	w.groups, err = cgroup.Open(fmt.Sprintf("dsecf%d.%d", os.Getpid(), worlds.Add(1)))
	must(t, err)
	binary, err := embedded.Hold()
	must(t, err)
	defer binary.Close()
	w.hold, err = hold.Ensure(ctx, hold.Options{Socket: filepath.Join(w.dir, "hold"), Binary: binary, Log: filepath.Join(w.dir, "hold.log")})
	must(t, err)
	w.mounts, err = rootfs.Open(ctx, rootfs.Options{Keeper: w.hold, Linger: time.Hour})
	must(t, err)
	w.disks, err = diskpool.Open(ctx, diskpool.Options{Dir: filepath.Join(w.dir, "pool"), Size: 2 << 30, Keeper: w.mounts.Keeper()})
	must(t, err)
	w.tier, err = container.Open(ctx, container.Config{Dir: filepath.Join(w.dir, "sandboxes"), UIDBase: 1<<29 + uint32(worlds.Load())*(1<<24), UIDRanges: 200,
		Hold: w.hold, Cgroups: w.groups, Disks: w.disks, Mounts: w.mounts, Log: slog.New(slog.DiscardHandler)})
	must(t, err)
	c := Config{Mechanism: w.tier, Source: w.source, Node: "t", Log: slog.New(slog.NewTextHandler(os.Stderr, nil))}
	for _, f := range change {
		f(&c)
	}
	w.e = New(c)
	return w
}

// close takes everything down; what is left is an error.
func (w *world) close(t testing.TB) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	note := func(err error) {
		if err != nil {
			t.Error(err)
		}
	}
	if w.e != nil {
		note(w.e.Close())
		list, err := w.tier.List(ctx)
		note(err)
		if len(list) > 0 || len(w.source.held) > 0 || w.source.live.Load() != 0 {
			t.Errorf("left: sandboxes %v, leases %v, budget %d", list, w.source.held, w.source.live.Load())
		}
		for _, s := range list {
			note(w.tier.Destroy(ctx, s.ID))
		}
		note(w.tier.Close())
	}
	if w.mounts != nil {
		note(w.mounts.Close())
	}
	if w.disks != nil {
		names, err := w.disks.List(ctx)
		note(err)
		if len(names) > 0 {
			t.Error("disks left:", names)
		}
		note(w.disks.Close())
	}
	if w.hold != nil {
		note(w.hold.Shutdown(ctx))
	}
	if w.groups != nil {
		names, err := w.groups.List()
		note(err)
		if len(names) > 0 {
			t.Error("control groups left:", names)
		}
		note(w.groups.RemoveAll(ctx))
	}
}

// call makes one, with the defaults of its fields.
func (w *world) call(t testing.TB, c dsec.Call) dsec.CallResult {
	t.Helper()
	r, err := w.try(c)
	must(t, err)
	return r
}

func (w *world) try(c dsec.Call) (dsec.CallResult, error) {
	if c.Image == "" && c.Type != dsec.CallWasm {
		c.Image = "base"
	}
	c.Fill()
	if err := c.Validate(); err != nil {
		return dsec.CallResult{}, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	return w.e.Call(ctx, "p", c)
}

func shell(script string) dsec.Call {
	return dsec.Call{Type: dsec.CallExec, Command: []string{"/bin/sh", "-c", script}}
}

func python(code string) dsec.Call { return dsec.Call{Type: dsec.CallPython, Code: []byte(code)} }

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

var base struct {
	sync.Once
	dir string
	l   layer.Local
	err error
}

// baseLayer is a layer with busybox and this machine's Python, made once.
func baseLayer(t testing.TB) layer.Local {
	t.Helper()
	base.Do(func() {
		if base.dir, base.err = os.MkdirTemp("", "dsec-function-test-"); base.err == nil {
			base.l, base.err = buildBase(base.dir)
		}
	})
	must(t, base.err)
	return base.l
}

const applets = "sh cat echo id ls cp mv rm ln mkdir touch sleep true false yes head seq setsid nohup kill ps mount umount chmod mkfifo dd env pwd test wc sort nc sync find stat date"

func buildBase(dir string) (layer.Local, error) {
	return layertest.Build(dir, func(tree string) error {
		script := `set -e; t=$1; mkdir -p $t/bin $t/etc $t/tmp $t/proc $t/sys $t/dev $t/var/spool/cron $t/root; chmod 1777 $t/tmp $t/var/spool/cron
cp /bin/busybox $t/bin/busybox; for a in $2; do ln -s busybox $t/bin/$a; done
printf 'root:x:0:0::/root:/bin/sh\nnobody:x:65534:65534::/:/bin/sh\n' >$t/etc/passwd; printf 'root:x:0:\nnogroup:x:65534:\n' >$t/etc/group
printf open >$t/etc/writable; chmod 666 $t/etc/writable`
		if out, err := exec.Command("sh", "-c", script, "sh", tree, applets).CombinedOutput(); err != nil {
			return fmt.Errorf("make root (Debian's busybox-static is needed): %w: %s", err, out)
		}
		return layertest.Python(tree)
	})
}

var _ runtime.Caller = (*Engine)(nil)

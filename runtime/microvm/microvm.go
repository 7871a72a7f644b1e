package microvm

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	goruntime "runtime"
	"sync"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/guest"
	"github.com/opendsec/dsec/internal/cgroup"
	"github.com/opendsec/dsec/internal/diskpool"
	"github.com/opendsec/dsec/internal/hold"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/netpolicy"
	"github.com/opendsec/dsec/rootfs"
	"github.com/opendsec/dsec/runtime"
	"github.com/opendsec/dsec/runtime/microvm/vmm"
	"github.com/opendsec/dsec/runtime/tier"
)

// Prefix begins the names of what this tier has of things that it shares with others: disk
// pool and control groups.
const Prefix = "vm."

// Machinery is what machines begin with.
type Machinery struct {
	VMM       vmm.VMM // a vmm.Adopter, too
	Kernel    vmm.File
	Initramfs vmm.File // whose init is dsec-guest
	Release   string   // of the kernel
}

// Config of a Runtime. What it names is used, not owned: Close closes none of it.
type Config struct {
	Dir      string // state, one directory for each sandbox
	Parallel int    // creations at a time; 0: 2 for each CPU
	Hold     *hold.Client
	Cgroups  *cgroup.Root
	Disks    diskpool.Pool
	Network  netpolicy.Network // nil: only network "none"
	Log      *slog.Logger      // nil: the default one

	// Open brings what machines begin with, when it is first needed, and again after an
	// error: getting a kernel may take a while.
	Open func(context.Context) (Machinery, error)
	// Devices are what is read of layers whose data are not all here; nil: such a layer is
	// Unavailable.
	Devices rootfs.Devices
	// Complete has all data of a layer brought here; nil: a checkpoint of which such a layer was
	// mapped is Unavailable.
	Complete func(context.Context, layer.Local) error
}

// Runtime is the tier of microVMs; see package runtime for what it promises.
type Runtime struct {
	cfg    Config
	hold   *hold.Client
	groups *cgroup.Root
	disks  diskpool.Pool
	log    *slog.Logger
	slots  chan struct{} // one for each creation under way

	boxes *tier.Table[*sandbox]
	ends  *tier.Ends
	life  context.Context
	stop  context.CancelCauseFunc
	tasks sync.WaitGroup

	opening chan struct{} // held by who opens the machinery

	mu        sync.Mutex
	machinery *Machinery
	caps      vmm.Caps
	kept      map[string]moment
}

var errClosed = errors.New("the runtime is closed")

var (
	_ runtime.Runtime      = (*Runtime)(nil)
	_ runtime.Execer       = (*Runtime)(nil)
	_ runtime.Filer        = (*Runtime)(nil)
	_ runtime.Pauser       = (*Runtime)(nil)
	_ runtime.Resumer      = (*Runtime)(nil)
	_ runtime.Dialer       = (*Runtime)(nil)
	_ runtime.Networker    = (*Runtime)(nil)
	_ runtime.Checkpointer = (*Runtime)(nil)
	_ runtime.Suspender    = (*Runtime)(nil)
	_ runtime.DiskWatcher  = (*Runtime)(nil)
)

// Open takes over the sandboxes of an earlier process, undoes what that had not finished
// and removes what belongs to nobody.
func Open(ctx context.Context, c Config) (*Runtime, error) {
	if c.Parallel <= 0 {
		c.Parallel = 2 * goruntime.NumCPU()
	}
	if c.Log == nil {
		c.Log = slog.Default()
	}
	if err := os.MkdirAll(c.Dir, 0o700); err != nil {
		return nil, dsec.E(dsec.Internal, "open microvm runtime", c.Dir, err)
	}
	r := &Runtime{cfg: c, hold: c.Hold, groups: c.Cgroups, disks: c.Disks, log: c.Log, slots: make(chan struct{}, c.Parallel),
		boxes: tier.NewTable(newSandbox), ends: tier.NewEnds(), opening: make(chan struct{}, 1), kept: map[string]moment{}}
	r.life, r.stop = context.WithCancelCause(context.WithoutCancel(ctx))
	if err := r.adopt(ctx); err != nil {
		r.stop(errClosed)
		r.tasks.Wait()
		r.letGo()
		return nil, err
	}
	r.tasks.Go(func() { r.ends.Send(r.life) })
	return r, nil
}

// Close lets go of everything and ends no sandbox. The machines go on, and the next process
// adopts them when this one has ended.
func (r *Runtime) Close() error {
	r.stop(errClosed)
	r.letGo()
	r.tasks.Wait()
	return nil
}

func (r *Runtime) letGo() {
	for _, sb := range r.boxes.All() {
		sb.services.Close()
		r.leave(sb)
	}
}

// Tier is "microvm".
func (r *Runtime) Tier() dsec.Tier { return dsec.TierMicroVM }

func (r *Runtime) dir(id dsec.SandboxID) string { return filepath.Join(r.cfg.Dir, string(id)) }

// probeShape is of the machine in which KVM is tried.
func probeShape(m Machinery) vmm.Shape {
	return vmm.Shape{Kernel: m.Kernel, Initramfs: m.Initramfs, CPUs: 1, Memory: 192 << 20}
}

// open returns what machines begin with, when it is known what accelerates them.
func (r *Runtime) open(ctx context.Context) (Machinery, error) {
	m, err := r.bring(ctx)
	if err != nil {
		return m, err
	}
	leave, err := r.openingTurn(ctx)
	if err != nil {
		return m, err
	}
	defer leave()
	r.mu.Lock()
	probed := r.caps.Accel != ""
	r.mu.Unlock()
	if probed {
		return m, nil
	}
	caps, err := m.VMM.Probe(ctx, probeShape(m), ready)
	if err != nil {
		return m, err
	}
	r.log.Info("virtual machines", "monitor", caps.Version, "kernel", m.Release, "accelerator", caps.Accel, "why", caps.NoKVM)
	r.mu.Lock()
	r.caps = caps
	r.mu.Unlock()
	return m, nil
}

// bring returns what machines begin with, brought once.
func (r *Runtime) bring(ctx context.Context) (Machinery, error) {
	leave, err := r.openingTurn(ctx)
	if err != nil {
		return Machinery{}, err
	}
	defer leave()
	r.mu.Lock()
	have := r.machinery
	r.mu.Unlock()
	if have != nil {
		return *have, nil
	}
	m, err := r.cfg.Open(ctx)
	if err != nil {
		return m, err
	}
	r.mu.Lock()
	r.machinery = &m
	r.mu.Unlock()
	return m, nil
}

func (r *Runtime) openingTurn(ctx context.Context) (leave func(), err error) {
	select {
	case r.opening <- struct{}{}:
		return func() { <-r.opening }, nil
	case <-ctx.Done():
		return nil, dsec.E(dsec.ClassOf(ctx.Err()), "open virtual machines", "", context.Cause(ctx))
	}
}

// ready waits for the agent of a machine that becomes a template. What is said to a guest before it opens its port waits for
// it there. Said once, nothing is on its way when the machine is stopped, that would change its
// memory after its state was written.
func ready(ctx context.Context, ch net.Conn) error {
	c, err := connectWithin(ctx, ch, bootTime, guest.Options{Once: true})
	if err != nil {
		return err
	}
	return errors.Join(c.Close(), ch.SetDeadline(time.Time{}))
}

// List tells of every sandbox, those being made or removed included. Of a guest that does not
// answer it knows no commands.
func (r *Runtime) List(ctx context.Context) ([]runtime.Status, error) {
	ctx, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	var wg sync.WaitGroup
	all := r.boxes.All()
	list := make([]*runtime.Status, len(all))
	for i, sb := range all {
		st, ok := sb.Status()
		if !ok {
			continue
		}
		list[i] = &st
		if st.Running {
			wg.Go(func() { list[i].Execs = r.execs(ctx, sb) })
		}
	}
	wg.Wait()
	out := make([]runtime.Status, 0, len(list))
	for _, st := range list {
		if st != nil {
			out = append(out, *st)
		}
	}
	return out, nil
}

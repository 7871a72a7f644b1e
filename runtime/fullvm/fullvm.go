package fullvm

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/cgroup"
	"github.com/opendsec/dsec/internal/diskpool"
	"github.com/opendsec/dsec/rootfs"
	"github.com/opendsec/dsec/runtime"
	"github.com/opendsec/dsec/runtime/microvm/vmm"
	"github.com/opendsec/dsec/runtime/tier"
)

// Machines is a VMM whose machines outlive this process.
type Machines interface {
	vmm.VMM
	vmm.Adopter
	// CheckSnapshot says whether Restore would take one.
	CheckSnapshot(ctx context.Context, dir string) error
}

// Config of a Runtime. What it names is used, not owned: Close closes none of it.
type Config struct {
	Dir      string          // state, one directory for each sandbox
	Machines Machines        // of nobody else; it puts the machine NAME into the groups that Place says
	Groups   *cgroup.Root    // of nobody else
	Disks    diskpool.Pool   // of nobody else
	Mounts   *rootfs.Mounts  // of layers
	Lost     <-chan struct{} // closed when what keeps machines has ended; nil: never
	Since    time.Time       // when that began; a machine of before was lost with another

	BIOS string // ("/usr/share/seabios/bios-256k.bin")
	UEFI string // ("/usr/share/ovmf/OVMF.fd"); its variables live as long as the machine is on

	AgentTime time.Duration // that a guest with the agent may take to boot (5 min)
	Log       *slog.Logger  // nil: the default one
}

// Runtime is the full VM tier; see package runtime for what it promises.
type Runtime struct {
	cfg   Config
	log   *slog.Logger
	boxes *tier.Table[*sandbox]
	ends  *tier.Ends
	stop  context.CancelCauseFunc
	life  context.Context
	tasks sync.WaitGroup

	mu       sync.Mutex
	firmware map[string]vmm.File // by path: those that were read
}

// errClosed is why work of a closed Runtime ends.
var errClosed = errors.New("the runtime is closed")

var (
	_ runtime.Runtime  = (*Runtime)(nil)
	_ runtime.Execer   = (*Runtime)(nil)
	_ runtime.Filer    = (*Runtime)(nil)
	_ runtime.Pauser   = (*Runtime)(nil)
	_ runtime.Resumer  = (*Runtime)(nil)
	_ runtime.Dialer   = (*Runtime)(nil)
	_ runtime.Screener = (*Runtime)(nil)
	_ runtime.Machiner = (*Runtime)(nil)
	_ runtime.Marker   = (*Runtime)(nil)
)

// Place is what a Keep of QEMU needs to put machines of this tier into the groups of a Root.
func Place(groups *cgroup.Root) func(name string) (group string, tasks []string) {
	return func(name string) (string, []string) {
		g, err := groups.Group(idOf(name))
		if err != nil {
			return "", nil
		}
		h, err := g.Handles()
		if err != nil {
			return "", nil
		}
		defer h.Close()
		var tasks []string
		for _, f := range h.Tasks {
			tasks = append(tasks, f.Name())
		}
		return h.Unified.Name(), tasks
	}
}

// Open takes over the sandboxes of an earlier process, undoes what that had not finished
// and removes what belongs to nobody.
func Open(ctx context.Context, c Config) (*Runtime, error) {
	c.BIOS = cmp.Or(c.BIOS, "/usr/share/seabios/bios-256k.bin")
	c.UEFI = cmp.Or(c.UEFI, "/usr/share/ovmf/OVMF.fd")
	c.AgentTime = cmp.Or(c.AgentTime, 5*time.Minute)
	if c.Log == nil {
		c.Log = slog.Default()
	}
	if err := os.MkdirAll(c.Dir, 0o700); err != nil {
		return nil, dsec.E(dsec.Internal, "open full VM runtime", c.Dir, err)
	}
	r := &Runtime{cfg: c, log: c.Log, boxes: tier.NewTable(newSandbox), ends: tier.NewEnds(), firmware: map[string]vmm.File{}}
	r.life, r.stop = context.WithCancelCause(context.WithoutCancel(ctx))
	if err := r.adopt(ctx); err != nil {
		return nil, errors.Join(err, r.Close())
	}
	r.tasks.Go(func() { r.ends.Send(r.life) })
	return r, nil
}

// Close lets go of everything and ends no sandbox.
func (r *Runtime) Close() error {
	r.stop(errClosed)
	for _, sb := range r.boxes.All() {
		sb.letGo()
		if m := sb.machineNow(); m != nil {
			r.cfg.Machines.Leave(m)
		}
	}
	r.tasks.Wait()
	return nil
}

// Tier is "fullvm".
func (r *Runtime) Tier() dsec.Tier { return dsec.TierFullVM }

func (r *Runtime) dir(id dsec.SandboxID) string { return filepath.Join(r.cfg.Dir, string(id)) }

// List tells of every sandbox, those being made or removed included.
func (r *Runtime) List(ctx context.Context) ([]runtime.Status, error) {
	ctx, cancel := context.WithTimeout(ctx, listTime) // for all: they are asked at once
	defer cancel()
	boxes := r.boxes.All()
	all := make([]runtime.Status, len(boxes))
	var asked sync.WaitGroup
	for i, sb := range boxes {
		sb.Mu.Lock()
		st := runtime.Status{ID: sb.ID, Running: sb.Phase == tier.Running, Paused: sb.Phase == tier.Running && sb.rec.Paused}
		there, ask := sb.Phase != tier.Absent, st.Running && !st.Paused && sb.rec.Image.Agent
		sb.Mu.Unlock()
		if !there {
			continue
		}
		all[i] = st
		if ask {
			asked.Go(func() { all[i].Execs = sb.execs(ctx) })
		}
	}
	asked.Wait()
	return slices.DeleteFunc(all, func(s runtime.Status) bool { return s.ID == "" }), nil
}

// execs are the commands of a machine with an agent. Of one that does not answer nobody knows any.
func (sb *sandbox) execs(ctx context.Context) []string {
	c, err := sb.await(ctx)
	if err != nil {
		return nil
	}
	ids, _ := c.List(ctx)
	return ids
}

const listTime = 5 * time.Second

// firmwareOf is the file of one, with its digest.
func (r *Runtime) firmwareOf(uefi bool) (vmm.File, error) {
	name := r.cfg.BIOS
	if uefi {
		name = r.cfg.UEFI
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if f, ok := r.firmware[name]; ok {
		return f, nil
	}
	f, err := digested(name)
	if err != nil {
		return f, err
	}
	r.firmware[name] = f
	return f, nil
}

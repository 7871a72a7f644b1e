package container

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	goruntime "runtime"
	"sync"
	"sync/atomic"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/audit"
	"github.com/opendsec/dsec/confine"
	"github.com/opendsec/dsec/internal/accounts"
	"github.com/opendsec/dsec/internal/cgroup"
	"github.com/opendsec/dsec/internal/diskpool"
	"github.com/opendsec/dsec/internal/hold"
	"github.com/opendsec/dsec/netpolicy"
	"github.com/opendsec/dsec/rootfs"
	"github.com/opendsec/dsec/runtime"
	"github.com/opendsec/dsec/runtime/tier"
)

// Config of a Runtime. What it names is used, not owned: Close closes none of it.
type Config struct {
	Dir        string            // state, one directory for each sandbox
	UIDBase    uint32            // first uid of the first range; 0: 1<<28
	UIDRanges  int               // 0: as many as there are uids
	HostMounts []string          // roots below which host directories may be shown; none: no host mounts
	Parallel   int               // creations at a time; 0: 4 for each CPU
	Shells     int               // sandboxes without a root that are kept ready, each about 0.7 MiB; 0: none
	Hold       *hold.Client      // the process that outlives us
	Cgroups    *cgroup.Root      //
	Disks      diskpool.Pool     // opened with the Keeper of Mounts
	Mounts     *rootfs.Mounts    //
	Network    netpolicy.Network // nil: only network "none"
	Witness    audit.Witness     // sees what sandboxes do; nil: nobody
	Log        *slog.Logger      // nil: the default one

	// Foreign says whether a name of a group, a disk or a shell of the hold is of another
	// runtime, which has the same; nil: none is.
	Foreign func(name string) bool
	// Unseen is told of a sandbox that the Witness does not see, and why; nil: nobody.
	Unseen func(dsec.SandboxID, error)
	// Refused is told of system calls that were refused and are of interest, also of a
	// sandbox that is gone and, after a crash, twice; nil: nobody, and none is noticed.
	Refused func(dsec.SandboxID, ...dsec.AuditRecord)
}

// defaultUIDBase is far above what distributions and subordinate ids use.
const defaultUIDBase = 1 << 28

// Runtime is the container tier; see package runtime for what it promises.
type Runtime struct {
	cfg    Config
	hold   *hold.Client
	groups *cgroup.Root
	disks  diskpool.Pool
	mounts *rootfs.Mounts
	log    *slog.Logger
	uids   *accounts.Ranges
	slots  chan struct{} // one for each creation under way
	sys    *os.File      // the /sys that sandboxes clone
	shells *shells
	looks  atomic.Int64 // at disks, so that each has a name of its own

	refusals        sync.Mutex // one taker at a time
	refusalsWritten uint64     // number of the last batch that is written down

	programs map[confine.Profile][]byte
	rlimits  map[confine.Profile][]hold.Rlimit
	mac      mac
	masks    []string
	readOnly []string

	boxes *tier.Table[*sandbox]
	ends  *tier.Ends
	stop  context.CancelCauseFunc
	life  context.Context
	tasks sync.WaitGroup
}

// errClosed is why work of a closed Runtime ends.
var errClosed = errors.New("the runtime is closed")

var (
	_ runtime.Runtime = (*Runtime)(nil)
	_ runtime.Execer  = (*Runtime)(nil)
	_ runtime.Filer   = (*Runtime)(nil)
	_ runtime.Pauser  = (*Runtime)(nil)
	_ runtime.Resumer = (*Runtime)(nil)
	_ runtime.Dialer  = (*Runtime)(nil)
	_ runtime.Packer  = (*Runtime)(nil)
)

// Open finds the sandboxes of an earlier process, undoes what that had not
// finished and removes what belongs to nobody.
func Open(ctx context.Context, c Config) (*Runtime, error) {
	if c.UIDBase == 0 {
		c.UIDBase = defaultUIDBase
	}
	if c.Parallel <= 0 {
		c.Parallel = 4 * goruntime.NumCPU()
	}
	if c.Log == nil {
		c.Log = slog.Default()
	}
	if c.UIDBase < accounts.IDs {
		return nil, dsec.Errorf(dsec.Invalid, "open container runtime", c.Dir, "uid base %d is below %d", c.UIDBase, accounts.IDs)
	}
	if err := os.MkdirAll(c.Dir, 0o700); err != nil {
		return nil, dsec.E(dsec.Internal, "open container runtime", c.Dir, err)
	}
	r := &Runtime{cfg: c, hold: c.Hold, groups: c.Cgroups, disks: c.Disks, mounts: c.Mounts, log: c.Log,
		uids: accounts.NewRanges(c.UIDBase, c.UIDRanges), slots: make(chan struct{}, c.Parallel),
		programs: map[confine.Profile][]byte{}, rlimits: map[confine.Profile][]hold.Rlimit{}, mac: openMAC(), masks: confine.MaskedPaths(), readOnly: confine.ReadOnlyPaths(), boxes: tier.NewTable(newSandbox), ends: tier.NewEnds()}
	for _, p := range offered() {
		program, err := c.program(p, false)
		if err != nil {
			return nil, dsec.E(dsec.Unsupported, "compile seccomp profile", string(p), err)
		}
		r.rlimits[p] = ownRlimits(p)
		r.programs[p] = program
	}
	r.shells = newShells(r, c.Shells)
	var err error
	if r.sys, err = c.Mounts.Shared(ctx, sysName, makeSys); err != nil {
		return nil, err
	}
	if err := r.adopt(ctx); err != nil {
		r.sys.Close()
		return nil, err
	}
	r.life, r.stop = context.WithCancelCause(context.WithoutCancel(ctx))
	r.tasks.Go(r.watchHold)
	r.tasks.Go(func() { r.ends.Send(r.life) })
	r.tasks.Go(r.shells.fill)
	return r, nil
}

// Close lets go of everything and ends no sandbox.
func (r *Runtime) Close() error {
	r.stop(errClosed)
	r.tasks.Wait()
	for _, sb := range r.boxes.All() {
		sb.services.Close()
		sb.closeRoot()
	}
	return r.sys.Close()
}

// Tier is "container".
func (r *Runtime) Tier() dsec.Tier { return dsec.TierContainer }

func (r *Runtime) dir(id dsec.SandboxID) string { return filepath.Join(r.cfg.Dir, string(id)) }

// List tells of every sandbox, those being made or removed included.
func (r *Runtime) List(ctx context.Context) ([]runtime.Status, error) {
	all := r.boxes.All()
	known, err := r.hold.List(ctx)
	if err != nil {
		return nil, err
	}
	execs := map[string][]string{}
	for _, s := range known {
		for _, e := range s.Execs {
			execs[s.ID] = append(execs[s.ID], e.Spec.ID)
		}
	}
	list := make([]runtime.Status, 0, len(all))
	for _, sb := range all {
		if st, ok := sb.Status(); ok {
			st.Execs = execs[string(sb.ID)]
			list = append(list, st)
		}
	}
	return list, nil
}

package node

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/audit"
	"github.com/opendsec/dsec/image"
	"github.com/opendsec/dsec/layer"
	dsecruntime "github.com/opendsec/dsec/runtime"
)

// Adder makes a layer of two files that fill writes, tags it, and keeps the
// lineage that fill returns with it.
type Adder func(ctx context.Context, n layer.New, fill func(image.Files) (dsec.Lineage, error)) (layer.Info, error)

// Config is all a node needs. Zero fields without a comment are required.
type Config struct {
	ID       dsec.NodeID
	Dir      string // of the ledger
	Runtimes map[dsec.Tier]dsecruntime.Runtime
	Isolated map[dsec.Isolation]dsecruntime.Runtime // of the container tier, with an isolation of its own; nil: none
	Store    layer.Store
	// Functions opens the function tier, which the node closes; nil: there is none.
	Functions func(dsecruntime.Source) dsecruntime.Caller

	Add         Adder             // nil: Commit is Unsupported
	Checkpoints layer.Checkpoints // nil: there are none, and none can be made
	Audit       *audit.Store      // evidence of what sandboxes did; nil: none is kept
	Judge       audit.Judge       // of Audit; nil: nobody looks for reward hacks
	MountRoots  []string          // host directories that may be shown inside; none: no host mounts
	Budgets     Budgets           // zero fields: see Budgets
	Lifetimes   dsec.Lifetimes    // defaults of specs; zero fields: see fillSpec
	Records     Retention         // zero fields: 30 days, 1 GiB
	StartLimit  int               // creations and starts at work at once; 0: 4 for each core
	StartQueue  int               // of those that wait for a turn; 0: 1,024
	StartTime   time.Duration     // most a creation may take; 0: 10 min
	PackTime    time.Duration     // most that packing the disk of a failed sandbox may take; 0: 10 min
	StopGrace   time.Duration     // that a main process gets; 0: 5 s
	Tick        time.Duration     // of expiry and clean-up; 0: 1 s
	Clock       func() time.Time  // nil: time.Now
	Log         *slog.Logger      // nil: discarded
	Metrics     *Metrics          // nil: counted for nobody
}

// Budgets are what the node may promise. The promises are the limits of
// sandboxes, which rarely use them up, so each budget is the machine's own
// amount times a factor.
type Budgets struct {
	CPU     float64 // cores; 0: those of the machine
	Memory  int64   // bytes; 0: those of the machine
	Disk    int64   // bytes; 0: the file system of Dir
	MaxLive int     // sandboxes with processes; 0: 4,000

	CPUFactor    float64 // 0: 16
	MemoryFactor float64 // 0: 10
	DiskFactor   float64 // 0: 32
}

// Retention bounds the records of ended sandboxes.
type Retention struct {
	Age   time.Duration
	Bytes int64
}

// fill sets every default.
func (c *Config) fill() error {
	if c.ID == "" || c.Dir == "" || len(c.Runtimes) == 0 || c.Store == nil {
		return dsec.Errorf(dsec.Invalid, "open node", string(c.ID), "id, directory, runtimes and store are required")
	}
	if err := os.MkdirAll(c.Dir, 0o700); err != nil {
		return dsec.E(dsec.Internal, "open node", c.Dir, err)
	}
	setDefault(&c.Records.Age, 30*24*time.Hour)
	setDefault(&c.Records.Bytes, 1<<30)
	setDefault(&c.StartLimit, 4*runtime.NumCPU())
	setDefault(&c.StartQueue, 1024)
	setDefault(&c.StartTime, 10*time.Minute)
	setDefault(&c.PackTime, 10*time.Minute)
	setDefault(&c.StopGrace, 5*time.Second)
	setDefault(&c.Tick, time.Second)
	setDefault(&c.Lifetimes.Idle, time.Hour)
	setDefault(&c.Lifetimes.Retention, time.Hour)
	if c.Clock == nil {
		c.Clock = time.Now
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.Metrics == nil {
		c.Metrics = NewMetrics()
	}
	for i, r := range c.MountRoots {
		real, err := filepath.EvalSymlinks(r)
		if err != nil {
			return dsec.E(dsec.Invalid, "open mount root", r, err)
		}
		c.MountRoots[i] = real
	}
	return c.Budgets.fill(c.Dir)
}

func (b *Budgets) fill(dir string) error {
	setDefault(&b.CPU, float64(runtime.NumCPU()))
	setDefault(&b.MaxLive, 4000)
	setDefault(&b.CPUFactor, 16)
	setDefault(&b.MemoryFactor, 10)
	setDefault(&b.DiskFactor, 32)
	if b.Memory == 0 {
		var si unix.Sysinfo_t
		if err := unix.Sysinfo(&si); err != nil {
			return dsec.E(dsec.Internal, "read memory size", "", err)
		}
		b.Memory = int64(si.Totalram) * int64(si.Unit)
	}
	if b.Disk == 0 {
		var st unix.Statfs_t
		if err := unix.Statfs(dir, &st); err != nil {
			return dsec.E(dsec.Internal, "read disk size", dir, err)
		}
		b.Disk = int64(st.Blocks) * st.Bsize
	}
	return nil
}

func setDefault[T comparable](p *T, v T) {
	var zero T
	if *p == zero {
		*p = v
	}
}

// fillSpec sets every default of a spec. They are: 1 core of weight 100, 1 GiB
// of memory, 512 processes, 4 GiB of disk, 64 MiB of kept output; no network;
// the profile "build"; an out-of-memory kill ends the command only, behind gvisor the sandbox; and the
// lifetimes of Config: idle 1 h, no cap, a stopped disk kept for 1 h.
func (c *Config) fillSpec(s *dsec.Spec) {
	setDefault(&s.Limits.CPU, 1)
	setDefault(&s.Limits.CPUWeight, 100)
	setDefault(&s.Limits.Memory, 1<<30)
	setDefault(&s.Limits.Pids, 512)
	setDefault(&s.Limits.Disk, 4<<30)
	setDefault(&s.Limits.Output, 64<<20)
	setDefault(&s.Lifetimes.Idle, c.Lifetimes.Idle)
	setDefault(&s.Lifetimes.Lifetime, c.Lifetimes.Lifetime)
	setDefault(&s.Lifetimes.Retention, c.Lifetimes.Retention)
	setDefault(&s.Network, dsec.NetworkNone)
	if s.Isolation == dsec.IsolationGVisor { // whose memory limit knows no commands
		setDefault(&s.OOM, dsec.OOMSandbox)
	}
	setDefault(&s.OOM, dsec.OOMExec)
	setDefault(&s.Profile, "build")
}

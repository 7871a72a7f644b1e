// Package cgroup limits, counts, freezes and kills the processes of a sandbox
// through the kernel's control groups, the same way on both layouts:
//
//   - hybrid: the controllers memory, cpu, cpuset, pids and devices are v1
//     hierarchies of their own, and a v2 tree without controllers is mounted
//     beside them;
//   - v2: one tree with everything, the device wall by BPF.
//
// In both, every sandbox has a group on the v2 tree (kill, freeze, emptiness,
// CPU time) and every command a child of it; limits are on the sandbox.
//
// # Layout
//
// A Root is a directory named by its caller below the caller's own place in
// each hierarchy. Where that is, is written on the v2 directory, so that a
// process that is started elsewhere finds the same Root again. A sandbox's
// limits are written on its v2 directory likewise. Names are 1 to 64 of
// [A-Za-z0-9._] and start with a letter or digit. The v1 groups that only say
// "these CPUs" or "these devices" are shared by all sandboxes that say the same.
//
// # Promises
//
// Create of an existing name is AlreadyExists; Remove of an unknown name
// succeeds, and removes also what a Create left that was killed half-way.
// Remove kills whatever is still inside. A Group is a name and some paths: it
// holds no descriptor, may be used concurrently, and needs no Close. A memory
// limit includes page cache and kernel memory; swap is always off.
package cgroup

import (
	"context"
	"os"
	"time"
)

// Version is the layout of a machine.
type Version int

// The layouts.
const (
	Hybrid Version = 1 // v1 controllers and a v2 tree without any
	V2     Version = 2 // one v2 tree
)

func (v Version) String() string {
	if v == V2 {
		return "v2"
	}
	return "v1 controllers with a v2 tree"
}

// Device is one line of a device allow-list. Minor -1 means all.
type Device struct {
	Block  bool
	Major  int64
	Minor  int64
	Access string // of "rwm"; "m" allows mknod
}

// Limits bound a group. Zero means no limit of that kind.
type Limits struct {
	CPU     float64  // cores of quota per period
	Weight  int      // 1..10000, 100 is normal
	Visible int      // number of CPUs to be seen by the group; which ones, the Root chooses
	Memory  int64    // bytes
	Pids    int64    // processes and threads
	Devices []Device // nil: no device wall; see DefaultDevices
}

// Stats is a sample of what a group uses.
type Stats struct {
	CPU         time.Duration
	Throttled   time.Duration
	Memory      int64
	MemoryPeak  int64 // 0 where the kernel does not tell
	MemoryLimit int64 // 0: none
	Pids        int64
	PidsPeak    int64 // 0 where the kernel does not tell
	PidsLimit   int64 // 0: none
	PidsDenied  int64 // forks refused by the limit
	OOMKills    int64 // processes killed by the memory limit
}

// Handles are what a starter needs to put a process into a group: the v2
// directory for CLONE_INTO_CGROUP, and the v1 files into which the new process
// writes "0" (none on a v2 machine).
type Handles struct {
	Unified *os.File
	Tasks   []*os.File
}

// Close closes all of them.
func (h *Handles) Close() {
	if h.Unified != nil {
		_ = h.Unified.Close()
	}
	for _, f := range h.Tasks {
		_ = f.Close()
	}
}

// Member is what a Group and a Child have in common: a set of processes.
type Member interface {
	Name() string
	// Handles opens what is needed to start a process in it; close them after.
	Handles() (*Handles, error)
	// Kill sends SIGKILL to every process in it and below, frozen ones too.
	Kill() error
	// Populated reports whether a process lives in it or below.
	Populated() (bool, error)
	// WaitEmpty returns when none does.
	WaitEmpty(ctx context.Context) error
	// CPUTime is what its processes have used, those that ended included.
	CPUTime() (time.Duration, error)
	// Remove kills what is inside, waits for its end and removes the group.
	Remove(ctx context.Context) error
}

package hold

import (
	"os"
	"time"

	"github.com/opendsec/dsec/process"
)

// Options of Ensure.
type Options struct {
	Socket  string        // path of the unix socket; its directory must exist and be ours
	Binary  *os.File      // dsec-hold, which is run if none runs and which one that runs becomes: embedded.Hold()
	Command []string      // how to run the hold itself instead, see SelfCommand; file helpers still run Binary
	Cgroup  string        // directory of the v2 cgroup the hold lives in; made if missing; "" stays where we are
	Tasks   []string      // v1 "tasks" files it joins
	Log     string        // file its log is appended to; "" discards it
	Forkers int           // single-threaded forkers under it; 0: one per core
	Start   time.Duration // how long it may take to start; 0: 10 s
}

// Info is what a hold says about itself.
type Info struct {
	Protocol int       // version of the protocol
	Version  string    // of the binary
	PID      int       // in the pid namespace it runs in
	Started  time.Time // of this hold
	Adopted  bool      // it ran before this client came
	Digest   string    // SHA-256 of its program, in hex
	Upgraded bool      // by this Ensure, which met another program
	Stale    error     // why it could not be upgraded, and runs another program still
}

// SpawnSpec describes the empty shell of a sandbox.
type SpawnSpec struct {
	ID      string // 1..64 of [A-Za-z0-9_.-]
	UIDBase uint32 // first host uid; id 0 inside
	GIDBase uint32
	Count   uint32 // ids mapped, from 0 inside

	// Cgroup is the directory of the sandbox's v2 cgroup, which exists. PID 1
	// lives in it and each command in a child "exec-ID", made and removed here.
	// RemoveSandbox leaves the directory itself to its maker.
	Cgroup string
	Tasks  []string // v1 "tasks" files of the sandbox's cgroups: PID 1 and every command join them

	OOMScoreAdj int // of PID 1

	Account Account // where hold reads what commands used

	// What needs no root is made while the caller prepares one: proc, and if not
	// Bare sys, dev with devpts, shm and mqueue, then Sysctls, ReadOnly and Masks.
	Bare     bool
	Sys      *os.File // detached mount for /sys, the caller's to close; nil: none
	ShmSize  int64    // bytes; 0: 64 MiB
	Lo       bool     // bring lo up
	Sysctls  []Sysctl
	ReadOnly []string // below /proc, remounted read-only
	Masks    []string // below /proc: files get the null device, directories an empty read-only one; missing ones are skipped
}

// Account names the files that are read at the start and the end of a command,
// so that its result is right also if no agent is there. Empty ones are
// skipped.
type Account struct {
	OOM      string // "oom_kill N" line: v1 memory.oom_control, v2 memory.events
	Limit    string // memory.limit_in_bytes, memory.max
	Peak     string // memory.max_usage_in_bytes, memory.peak
	Throttle string // "throttled_time ns" or "throttled_usec": cpu.stat
}

// Shell is what Spawn made. The files are the caller's to close.
type Shell struct {
	UserNS *os.File
	NetNS  *os.File
	// MountNS is what the sandbox sees once it is entered; only of Namespaces.
	MountNS *os.File

	PID int // of PID 1 in hold's pid namespace; for logs and the ledger only
}

// EnterSpec gives a shell its root, into which its file systems are moved, and
// then Mounts. A target inside the root is made if missing; dev, proc and sys
// must not be symbolic links. Files stay the caller's.
type EnterSpec struct {
	ID       string
	As       string   // id from now on; "" keeps it. Nothing may have it
	Root     *os.File // detached mount
	Hostname string
	Mounts   []Mount
}

// Mount is one extra mount of a sandbox.
type Mount struct {
	Source *os.File // detached mount; nil: a tmpfs
	Target string   // absolute inside; symbolic links are followed within the root
	Size   int64    // tmpfs: bytes
	Mode   uint32   // tmpfs: of its root; 0: 01777
	RO     bool
	Exec   bool // else noexec; nosuid and nodev always
}

// Sysctl is written below /proc/sys before masks are made.
type Sysctl struct {
	Path  string // "net/ipv4/ping_group_range"
	Value string
}

// Caps are capability sets as bit masks. Effective is Permitted for uid 0 and
// Ambient for others.
type Caps struct {
	Bounding    uint64
	Permitted   uint64
	Inheritable uint64
	Ambient     uint64
}

// Rlimit is one resource limit.
type Rlimit struct {
	Resource int // RLIMIT_*
	Cur, Max uint64
}

// Landlock is what a command, and all it starts, may do to files, whoever it is:
// of the accesses that are handled (LANDLOCK_ACCESS_FS_*) only what a rule gives at
// and below a path. A path that is not there gives nothing, nor does one with a
// symbolic link in it.
type Landlock struct {
	Handled uint64
	Rules   []LandlockRule
}

// LandlockRule gives accesses at and below an absolute path.
type LandlockRule struct {
	Access uint64
	Path   string
}

// ExecSpec describes a command. Spec is what the caller asked for: its ID,
// Argv, Stdin, PTY, Timeout, Head, Tail and OnLimit are used as they are; the
// other fields are what the runtime made of the rest.
//
// Starting an ID again with an equal Spec gives the running command, with
// another one Conflict.
type ExecSpec struct {
	Sandbox string
	Spec    process.Spec
	Wrap    []string // a program and arguments that are run instead, with Spec.Argv behind them; empty: none

	Env    []string // complete, "K=V"; its PATH finds Argv[0]
	Cwd    string   // "" is "/"
	UID    uint32
	GID    uint32
	Groups []uint32

	Caps        Caps
	NoNewPrivs  bool
	Seccomp     []byte // array of struct sock_filter; empty: none
	Notice      bool   // Seccomp is of confine.Noticing: the hold answers what it asks, and keeps the Refusals
	Landlock    *Landlock
	AppArmor    string // loaded profile that the program gets; "": none, and none is asked for
	Rlimits     []Rlimit
	OOMScoreAdj int
	Umask       uint32 // 0: 022

	Spool string // existing directory; the spools are EXEC.out and EXEC.err in it, removed by Release
}

// FilesSpec asks for the file helper of a sandbox.
type FilesSpec struct {
	Sandbox string
	UID     uint32
	GID     uint32
	Groups  []uint32
	Caps    Caps   // what the user holds on files: CAP_DAC_OVERRIDE … for root
	Cgroup  string // v2 cgroup directory it lives in, which exists; not the sandbox's
	Tasks   []string
}

// ExecResult is how a command ended; see process.Result for the fields.
type ExecResult = process.Result

// ExecInfo is what hold knows of a command.
type ExecInfo struct {
	Sandbox string
	Spec    process.Spec
	PID     int // in hold's pid namespace
	Started time.Time
	Spool   string
	Ended   bool
	Acked   bool
	Result  ExecResult // Status is Running until Ended
}

// SandboxInfo is what hold knows of a sandbox.
type SandboxInfo struct {
	ID      string
	PID     int
	Cgroup  string
	Entered bool
	Held    bool
	Ended   bool // PID 1 is gone and with it every process
	Asked   bool // KillSandbox was called before the end
	Signal  int  // that ended PID 1
	Acked   bool
	Execs   []ExecInfo
}

// EventType names what hold reports.
type EventType string

// The events.
const (
	ExecExited    EventType = "exec_exited"
	SandboxExited EventType = "sandbox_exited"
	Refused       EventType = "refused"      // there are Refusals; no sandbox is named, nothing is acknowledged
	PlainExited   EventType = "plain_exited" // told by Plain.Wait, not by Events
)

// Event is sent once to each client until it is acknowledged.
type Event struct {
	Type    EventType
	Sandbox string
	Exec    string     // ExecExited
	Result  ExecResult // ExecExited
	Signal  int        // SandboxExited: what ended PID 1
	Asked   bool       // SandboxExited: by KillSandbox

	Plain string `json:",omitempty"` // PlainExited: its name; Signal is what ended it
	PID   int    `json:",omitempty"` // PlainExited: which of those that had the name
	Code  int    `json:",omitempty"` // PlainExited: exit code, 0 if a signal ended it
}

// PlainSpec describes a process of the node's own: in no sandbox, without capabilities
// and ways to get any (no_new_privs), in network, IPC and host name namespaces of its own,
// in a session of its own, with no environment, at /. It dies with the hold.
type PlainSpec struct {
	Name   string // 1..64 of [A-Za-z0-9_.-]
	Path   string // absolute; the user can execute it
	Args   []string
	UID    uint32 // not 0, nor are the groups
	GID    uint32
	Groups []uint32

	Cgroup      string   // directory on the v2 tree, which stays its maker's; "": the hold's
	Tasks       []string // v1 "tasks" files to join
	OOMScoreAdj int
}

// PlainInfo is what hold knows of such a process.
type PlainInfo struct {
	Spec    PlainSpec
	PID     int // in hold's pid namespace
	Started time.Time
	Ended   bool // and not acknowledged
	Code    int  // exit code, 0 if a signal ended it
	Signal  int
}

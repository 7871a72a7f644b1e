// Package runtime is the contract between the node and an isolation mechanism.
//
// # Lifecycle
//
//	Create ──→ running ──→ Stop ──→ stopped ──→ Start ──→ running …
//	   └──────────┴──────────┴─────────┴──→ Destroy (from anywhere)
//
// Create builds a sandbox and has it running when it returns. Stop ends its
// processes and keeps its disk; Start runs it again on that disk with the same
// identity. Destroy removes everything, whatever the state, and also what a
// Create left behind that was killed half-way: after it, nothing of the id is
// on the machine. An implementation keeps what it needs to know about its
// sandboxes on its own disk or in its own supervisor, so that a new process
// can open it and List what lives.
//
// # Promises
//
// Every method is idempotent: Create of an existing id with an equal Request
// is a success, with another one Conflict; Stop of a stopped, Start of a
// running and Destroy of an unknown id succeed. If Create or Start errs or its
// context ends, the implementation has undone what it did before it returns;
// undoing ignores cancellation and has its own limit of 10 s. Methods on
// different ids run concurrently; methods on one id may be called concurrently
// and take effect one after the other, except that Destroy ends an exec, file
// or port call in flight with SandboxGone. Errors are *dsec.Error.
//
// # Abilities
//
// What a tier can do beyond that are interfaces of a method or two: Execer, Filer,
// Pauser, Resumer, Dialer, Packer, Networker, Phaser, Forker, Checkpointer, Suspender, Celler, Screener, Machiner, Marker. A caller asks with a type assertion
// and reports Unsupported with the tier's name if it fails. Nothing in this
// package mentions a pid, a descriptor or a host path of a running sandbox:
// above the runtime nobody may assume a shared kernel.
package runtime

import (
	"context"
	"net"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/files"
	"github.com/opendsec/dsec/image"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/process"
)

// Request is all a runtime needs to build a sandbox. Spec has its defaults
// filled in: no limit or lifetime in it is zero except Lifetime.
type Request struct {
	ID     dsec.SandboxID
	Spec   dsec.Spec
	Layers layer.Set
	From   string `json:",omitempty"` // the moment of a Forker that it goes on from, of the same layers; "": it begins anew
}

// Report is what a probe found.
type Report struct {
	Tier   dsec.Tier
	OK     bool
	Checks []Check
}

// Check is one line of dsec doctor.
type Check struct {
	Name   string // "mount plan", "disk limit", "cgroup"
	OK     bool
	Detail string // what is used, or why it cannot be and what it needs
	Fatal  bool   // the tier cannot work without it
}

// Status of one sandbox as the mechanism sees it.
type Status struct {
	ID      dsec.SandboxID
	Running bool
	Paused  bool
	Execs   []string // ids of commands that run or wait for Release
}

// Exit says that a running sandbox ended by itself.
type Exit struct {
	ID       dsec.SandboxID
	Cause    dsec.Cause
	By       dsec.Inducer
	Evidence []string
}

// Stats is a sample of what a sandbox uses.
type Stats struct {
	CPU         time.Duration
	Throttled   time.Duration
	Memory      int64 // bytes now, page cache of its own files included
	MemoryPeak  int64
	MemoryLimit int64
	HostMemory  int64 `json:",omitempty"` // bytes that a machine of its own takes of this one, shared ones by its part; 0: it has none
	Pids        int64
	PidsPeak    int64 // 0 where the kernel does not tell
	PidsLimit   int64
	Disk        int64 // bytes of the writable layer
	DiskLimit   int64
	OOMKills    int64
	PidsDenied  int64 // forks refused by the limit
}

// Runtime is one mechanism.
type Runtime interface {
	Tier() dsec.Tier
	// Probe tries what the tier needs on this machine; conclusive answers only.
	Probe(ctx context.Context) Report
	// Create returns the time each of its steps took, also with an error.
	Create(ctx context.Context, r Request) ([]dsec.Step, error)
	Start(ctx context.Context, id dsec.SandboxID) ([]dsec.Step, error)
	// Stop asks the main process to end, waits for grace, then ends everything.
	Stop(ctx context.Context, id dsec.SandboxID, grace time.Duration) error
	Destroy(ctx context.Context, id dsec.SandboxID) error
	Stats(ctx context.Context, id dsec.SandboxID) (Stats, error)
	List(ctx context.Context) ([]Status, error)
	// Exits returns the channel on which ends that nobody asked for are sent,
	// those that happened before this process started included, each once
	// until Stop or Destroy of the id acknowledges it. One receiver.
	Exits() <-chan Exit
	// Close lets go of everything without ending any sandbox.
	Close() error
}

// Execer runs commands.
type Execer interface {
	// Exec starts a command; see package process for ids and cancellation.
	// A failure of the command's own making (no such program, user or cwd) is
	// an error that names it, and leaves nothing.
	Exec(ctx context.Context, id dsec.SandboxID, s process.Spec) (process.Process, error)
	// Process finds a command that runs or waits for Release.
	Process(ctx context.Context, id dsec.SandboxID, exec string) (process.Process, error)
}

// Filer opens the file service as a user: a name, or "uid[:gid]"; "" is the
// sandbox's default. On a stopped sandbox it works on the kept disk.
type Filer interface {
	Files(ctx context.Context, id dsec.SandboxID, user string) (files.FS, error)
}

// Pauser has all of a running sandbox stand still; the clocks of its commands stop. After an error it
// runs as before, or Resume has it go on.
type Pauser interface {
	Pause(ctx context.Context, id dsec.SandboxID) error
}

// Resumer has a paused sandbox go on.
type Resumer interface {
	Resume(ctx context.Context, id dsec.SandboxID) error
}

// Suspender is a Pauser that can do without a sandbox's memory.
type Suspender interface {
	// Suspend pauses a running sandbox, or one that is paused, and has what it has in memory be on
	// disk only. It stays so through restarts of everything. Whatever reaches into it brings
	// it back first, paused; Resume has it go on, with the time and an address of then.
	Suspend(ctx context.Context, id dsec.SandboxID) error
}

// Dialer connects to a port inside the sandbox's network, whatever its mode.
type Dialer interface {
	// Dial errs with Unavailable if nothing listens there.
	Dial(ctx context.Context, id dsec.SandboxID, port uint16) (net.Conn, error)
}

// Networker changes what a running sandbox may reach, and says what it has.
type Networker interface {
	// SetNetwork puts a policy in force. When it returns, what that does not open
	// is closed, and connections there are dead; it stays in force for later starts,
	// too. IllegalState for one that was made without a network.
	SetNetwork(ctx context.Context, id dsec.SandboxID, p dsec.NetworkPolicy) (generation uint64, err error)
	// Egress is what one has reached, and what it was refused, since its network
	// began. One without a network has reached nothing.
	Egress(ctx context.Context, id dsec.SandboxID) (dsec.Egress, error)
}

// Moved is what a move from a phase to another did.
type Moved struct {
	Killed  int    // processes that were ended
	Network uint64 // generation of the policy that is in force; 0: it was left as it was
}

// Phaser moves sandboxes from one phase of their spec to another.
type Phaser interface {
	// SetPhase kills every process of a running sandbox and puts the named phase in
	// force. No process runs between the two, and what
	// is started after it has the rights of the phase. It stays in force for later
	// starts. An error after the killing has begun leaves the sandbox frozen, which
	// List tells, with nothing running and nothing to be started in it, until the same
	// move is asked for again or it is stopped; so does a crash in the middle.
	SetPhase(ctx context.Context, id dsec.SandboxID, name string) (Moved, error)
	// CanPhase says why the phases of a spec cannot be had here, as an Unsupported
	// error.
	CanPhase(s dsec.Spec) error
}

// DiskWatcher knows how the disks of its sandboxes are.
type DiskWatcher interface {
	// DiskFailed is why all disks have failed, and what is in them is lost or will
	// be; nil while they have not. It is quick.
	DiskFailed(ctx context.Context) error
	// DiskFull is why a write to any disk may be refused now, whatever its limit says:
	// what all of them share has no room; nil while it has. It is quick.
	DiskFull(ctx context.Context) error
}

// Forker makes copies of what runs, with its memory and its disk.
type Forker interface {
	// KeepMoment keeps what a running sandbox is at one moment, under a name that no other
	// has (1 to 60 letters and digits), until DropMoment or the end of this process; the sandbox goes on, or stays paused. A creation whose Request is
	// From it goes on from there: the same processes, commands included, with names, addresses,
	// time and random numbers of its own.
	KeepMoment(ctx context.Context, id dsec.SandboxID, name string) error
	// DropMoment forgets one. Unknown names are no error.
	DropMoment(ctx context.Context, name string) error
}

// Checkpointer is a Forker whose moments can go on on another machine.
type Checkpointer interface {
	Forker
	// OpenMoment opens what a moment that was kept is. The caller closes its files.
	OpenMoment(ctx context.Context, name string) (Moment, error)
	// BringMoment makes a moment of that name of what OpenMoment gave somewhere else, on the same layers,
	// whose data it brings whole where the moment needs that. fill writes the two files, which are empty. Unsupported,
	// before fill is called, if nothing here could go on from it; after any error there is no such moment.
	BringMoment(ctx context.Context, name string, m Moment, layers []layer.Local, fill func(ctx context.Context, f layer.MomentFiles) error) error
}

// Moment is a sandbox that stands still.
type Moment struct {
	Spec    dsec.Spec         // as it was asked for
	Config  image.Config      // of its layers
	Machine []byte            // the tier's own: JSON
	Files   layer.MomentFiles // whole; of one that is to be brought: none
	Disk    int64             // bytes of the files
	Memory  int64
}

// Packer makes layers of disks.
type Packer interface {
	// Pack writes what a sandbox changed as the two files of a layer that stands
	// on those it was made of. It works on a sandbox that is stopped, has ended,
	// is paused or runs; one that runs stands still for a moment, which is told,
	// and goes on. What it holds is what the disk held at one moment: programs
	// that survive being killed at any moment survive being packed. On error, and
	// when ctx ends, the sandbox is as it was, and the files hold nothing of value.
	Pack(ctx context.Context, id dsec.SandboxID, into image.Files, scrub dsec.Scrub) (dsec.Packed, error)
	// Changes lists what a sandbox changed, at most so many.
	Changes(ctx context.Context, id dsec.SandboxID, most int) (dsec.Changes, error)
}

// Screener shows the screen of a running sandbox, and does there what a person would.
// Of a sandbox without a screen both are Unsupported.
type Screener interface {
	// Screenshot is what the screen shows now.
	Screenshot(ctx context.Context, id dsec.SandboxID, region dsec.Region) (dsec.Picture, error)
	// Act does one after the other, as fast as a person's devices would. It returns when the devices
	// have been told all; what that makes of the screen comes when it comes. When an action
	// cannot be done none that follows is.
	Act(ctx context.Context, id dsec.SandboxID, actions []dsec.ScreenAction) error
}

// Machiner has sandboxes that are machines with a power switch and a serial port.
type Machiner interface {
	Power(ctx context.Context, id dsec.SandboxID, p dsec.Power) error
	// Console is the end of what the machine wrote to its serial port.
	Console(ctx context.Context, id dsec.SandboxID) ([]byte, error)
}

// Marker goes back to what a running sandbox was: its memory, programs and disk.
type Marker interface {
	// Mark keeps what a running sandbox is at this moment under a name, in place of what had the name. It
	// stands still meanwhile, and goes on. What is kept counts for its disk limit.
	Mark(ctx context.Context, id dsec.SandboxID, name string) error
	// Revert makes of a sandbox, which runs or is paused, what had that name, and has it run. Commands
	// that were started since are gone; those that had ended since run again.
	Revert(ctx context.Context, id dsec.SandboxID, name string) error
	// Marks lists the names.
	Marks(ctx context.Context, id dsec.SandboxID) ([]string, error)
}

// Package process is the contract of commands in a sandbox: how one is
// described (Spec), watched and steered (Process), and how it ended (Result).
// A tier that can run commands returns Processes; nobody above it learns a
// host pid.
//
// Lifecycle: a Process exists from a successful start until Release. Its
// output has offsets counted in bytes from 0 for each stream, so a reader may
// drop and follow again where it stopped; what was neither kept nor read in
// time is gone and shows as a jump of the offset. A Process outlives the
// connection of its caller and the node agent.
//
// Starting the same ID again with the same Spec returns the running Process;
// with another Spec it is a Conflict. Cancelling the context of a start never
// leaves a half-started command: either it runs and is listed, or nothing is
// left of it. All methods may be called concurrently.
package process

import (
	"context"
	"time"

	"github.com/opendsec/dsec"
)

// Stream names an output stream. A PTY has Stdout only.
type Stream int

// The streams.
const (
	Stdout Stream = 1
	Stderr Stream = 2
)

// OnLimit says what happens when a command writes more than is kept.
type OnLimit string

// The choices.
const (
	Truncate OnLimit = "truncate" // go on, count, keep head and tail
	Kill     OnLimit = "kill"     // end the command, status output_limit
)

// Size is a terminal's.
type Size struct{ Rows, Cols uint16 }

// Spec describes a command.
type Spec struct {
	ID      string            // caller's key, 1..64 of [A-Za-z0-9_.]; the runtime makes one if empty
	Argv    []string          // program and arguments; looked up in PATH of Env when it has no '/'
	Env     map[string]string // added to the sandbox's
	Cwd     string            // the sandbox's default if empty
	User    string            // name, or "uid" or "uid:gid"; the sandbox's default if empty
	Stdin   bool              // keep stdin open for Write; else end of file at once
	PTY     *Size             // nil: pipes
	Timeout time.Duration     // 0: none; the clock stops while the node holds the sandbox, wall at most 2×+60 s
	Head    int64             // kept bytes from the start, per stream; 0: 1 MiB
	Tail    int64             // kept bytes from the end, per stream; 0: 1 MiB
	OnLimit OnLimit           // "" is Truncate
	Main    bool              // its end is the sandbox's end
	Service bool              // started in the first phase of a sandbox, it outlives that, as a user that is nobody else
}

// Status says what ended a command.
type Status string

// The statuses.
const (
	Running     Status = "running"
	Exited      Status = "exited"       // by itself, or by a signal nobody of ours sent
	TimedOut    Status = "timeout"      // ExitCode is 137, but it means nothing
	Killed      Status = "killed"       // by Kill, or with its sandbox
	OutputLimit Status = "output_limit" // OnLimit Kill fired
	Lost        Status = "lost"         // the hold that knew it died
)

// OutputSummary is what is known of a stream at the end.
type OutputSummary struct {
	Total     int64 // bytes written by the command
	Dropped   int64 // bytes neither kept nor read by a follower
	Truncated bool  // kept head and tail do not join
}

// Result is how a command ended.
type Result struct {
	Status   Status
	ExitCode int   // 0..255; 128+signal when a signal ended it
	Signal   int   // 0 if none
	OOM      bool  // the memory limit killed it or a child
	OOMLimit int64 // bytes, when OOM
	OOMPeak  int64 // bytes, when OOM
	Stdout   OutputSummary
	Stderr   OutputSummary
	Started  time.Time
	Wall     time.Duration
	CPU      time.Duration
	Throttle time.Duration // held back by the CPU quota
	Held     time.Duration // the node held the sandbox

	// Blame is what the sandbox was blamed on when the command ended, see
	// dsec.Blame: what it did may come of that. The node sets it: the hold, whose
	// state has results in it, knows of no blame.
	Blame dsec.Cause `json:",omitempty"`
}

// Chunk is a piece of output. Offset is where Data begins; it is larger than
// asked for when bytes in between are gone. The last chunk has EOF set and may
// be empty. Data is valid until the next call.
type Chunk struct {
	Offset int64
	Data   []byte
	EOF    bool
}

// Reader follows a stream. While it is open and keeps up, the command is
// slowed down rather than its output dropped.
type Reader interface {
	Next(ctx context.Context) (Chunk, error)
	Close() error
}

// Process is a command in a sandbox.
type Process interface {
	Spec() Spec
	// Follow reads a stream from an offset. At most 16 followers per stream.
	Follow(ctx context.Context, s Stream, offset int64) (Reader, error)
	// Kept returns the kept head and tail. Tail begins at the returned offset.
	Kept(ctx context.Context, s Stream) (head, tail []byte, tailOffset int64, err error)
	// Write feeds stdin and blocks while the command does not read.
	Write(ctx context.Context, p []byte) (int, error)
	CloseStdin(ctx context.Context) error
	Resize(ctx context.Context, s Size) error
	// Signal reaches the main process only, never a reused pid. After its end: IllegalState.
	Signal(ctx context.Context, sig int) error
	// Kill ends the whole tree, setsid children too. After the end: no error.
	Kill(ctx context.Context) error
	// Wait returns when the main process has exited and its pipes are drained,
	// at most 100 ms later; it never waits for a daemon that holds them.
	Wait(ctx context.Context) (Result, error)
	// Release forgets an ended command and its kept output. Idempotent.
	Release(ctx context.Context) error
}

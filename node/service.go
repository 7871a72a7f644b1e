// Package node is one machine: the lifecycles of its sandboxes, the budgets
// they are admitted against, the ledger that is the truth about them, their
// records after the end, and recovery.
//
// A change is written to the ledger before it is told to anybody. What was begun
// is finished or undone, by this process or the next one: the caller going away
// does not stop it half-way, except for a Create without a call id, which is
// undone. Calls on one sandbox take turns, calls on different ones do not meet.
//
// A sandbox ends when somebody stops or deletes it, when its main process ends,
// when its mechanism says so, or when a lifetime is over. A running command and
// an attached client (Attach, an open port, a file transfer) stop the idle
// clock; every expiry is announced by an event. The disk of a stopped or failed
// sandbox is kept for its retention time; then only the record is left.
//
// A sandbox that has a layer of which a read was an error while it lived, which it
// does until its processes are known to be gone, is blamed on infra_image: it may
// have seen the error. It becomes the cause of its end, unless a policy, a
// preemption or the platform itself ends it. It is not ended for that. Until then
// it says so (Sandbox.Blame), and so do its commands that end after the error
// (process.Result.Blame), whatever their exit code. That is in the ledger before
// the reader is told of the error, see LayerFailed.
package node

import (
	"context"
	"net"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/files"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/process"
	"github.com/opendsec/dsec/runtime"
)

// Sandbox is what the node tells about one sandbox.
type Sandbox struct {
	ID      dsec.SandboxID
	Project string // owner; set by the gateway, opaque here
	Spec    dsec.Spec
	State   dsec.State
	Result  *dsec.Result // set in stopped, failed and deleted
	Digests []string     // the layers its refs resolved to
	Created time.Time
	Changed time.Time
	Expires time.Time // zero: no cap
	Starts  int
	Steps   []dsec.Step        // of its last creation or start
	Kept    *Kept              // its disk, packed because it failed; nil: it is not
	Blame   *dsec.Blame        // what it is blamed on; nil: nothing
	Network *dsec.NetworkState // nil: as in its spec, never changed
	Phase   *dsec.PhaseState   // nil: it has none
	Grades  []dsec.GradeResult // the last ones, oldest first
}

// Kept says where the disk of a failed sandbox is.
type Kept struct {
	Digest string    `json:"digest"`
	Tag    string    `json:"tag"`
	Until  time.Time `json:"until"`
}

// Filter selects sandboxes; zero fields match all.
type Filter struct {
	Project string
	States  []dsec.State
	Labels  map[string]string
	Rollout string
	All     bool // ended ones (records) too
}

// Load is what a node reports in its heartbeat.
type Load struct {
	Live, Starting int
	MaxLive        int
	CPU, Memory    float64 // committed fraction of the budget, 0..1
	Disk           float64
	Tiers          []dsec.Tier
	Draining       bool
}

// Confiner changes what a sandbox may do, and says what it did.
type Confiner interface {
	// SetNetwork changes what a running or paused sandbox may reach. When it returns,
	// what the policy does not open is closed, and connections there are dead.
	SetNetwork(ctx context.Context, id dsec.SandboxID, p dsec.NetworkPolicy, callID string) (Sandbox, error)
	// Egress is what one that lives has reached, and what it was refused.
	Egress(ctx context.Context, id dsec.SandboxID) (dsec.Egress, error)
	// SetPhase moves a running or paused sandbox to another of its phases, and has it
	// running. An error after the move has begun leaves it paused and moving: the same
	// call goes on with it, and nothing but Stop and Delete does anything else.
	SetPhase(ctx context.Context, id dsec.SandboxID, name, callID string) (Sandbox, error)
}

// Forker copies sandboxes, and keeps them elsewhere than in memory.
type Forker interface {
	// Suspend pauses a running or paused sandbox, and has its memory be on disk only. It is
	// paused then, as by Pause; Resume, and whatever else reaches into it, brings it back.
	Suspend(ctx context.Context, id dsec.SandboxID, callID string) (Sandbox, error)

	// Fork makes copies of a running or paused sandbox, which goes on: processes, memory and
	// disk as they are at one moment, names and random numbers of their own. All are made,
	// or none. Unsupported for a tier that has no memory of its own to copy.
	Fork(ctx context.Context, id dsec.SandboxID, count int, callID string) ([]Sandbox, error)
}

// Checkpointer keeps sandboxes as they are at one moment where other nodes find them. A
// creation whose spec names one goes on from it (dsec.Spec.GoesOnFrom).
type Checkpointer interface {
	// Checkpoint keeps a running or paused sandbox, which goes on: processes, memory and disk. It is
	// kept for that time; 0: dsec.KeepCheckpoint. Unsupported for a tier that has no memory of its own, and
	// on a node without object storage.
	Checkpoint(ctx context.Context, id dsec.SandboxID, keep time.Duration, callID string) (dsec.Checkpoint, error)
	// FindCheckpoint tells of a project's checkpoint, whichever node made it.
	FindCheckpoint(ctx context.Context, project, digest string) (dsec.Checkpoint, error)
}

// Grader grades what was done in a sandbox.
type Grader interface {
	// Grade runs a grader, in a fresh sandbox unless the spec says otherwise, and
	// reads its reward. A result says what was found, an error that nothing was.
	Grade(ctx context.Context, id dsec.SandboxID, s dsec.GradeSpec, callID string) (dsec.GradeResult, error)
}

// Service is what the node offers to the gateway, before any wire. Errors are
// *dsec.Error. callID makes a mutating call idempotent ("" does not): the same
// id returns the same answer for 24 h.
type Service interface {
	Confiner
	Create(ctx context.Context, project string, s dsec.Spec) (Sandbox, error) // key: s.CallID
	Get(ctx context.Context, id dsec.SandboxID) (Sandbox, error)              // ended ones from their record
	List(ctx context.Context, f Filter) ([]Sandbox, error)
	Start(ctx context.Context, id dsec.SandboxID, callID string) (Sandbox, error)
	Stop(ctx context.Context, id dsec.SandboxID, cause dsec.Cause, callID string) (Sandbox, error)
	Delete(ctx context.Context, id dsec.SandboxID, callID string) (existed bool, err error)
	Pause(ctx context.Context, id dsec.SandboxID, callID string) (Sandbox, error)
	Resume(ctx context.Context, id dsec.SandboxID, callID string) (Sandbox, error)
	// Renew moves the idle clock, and the lifetime if given.
	Renew(ctx context.Context, id dsec.SandboxID, lifetime time.Duration, callID string) (Sandbox, error)
	// Commit makes a layer of what was changed in the sandbox, which may run and
	// goes on, and gives it the tag, if there is one, and the tag to its project.
	Commit(ctx context.Context, id dsec.SandboxID, tag layer.Tag, scrub dsec.Scrub, callID string) (dsec.Packed, error)
	Grader
	Forker
	Checkpointer
}

// Inside is what reaches into a sandbox. Exec and Dial resume a paused sandbox
// first. Once a sandbox has ended, stopped included, they err with SandboxGone;
// Files works on a disk that is still kept.
type Inside interface {
	Exec(ctx context.Context, id dsec.SandboxID, s process.Spec) (process.Process, error)
	Process(ctx context.Context, id dsec.SandboxID, exec string) (process.Process, error)
	Files(ctx context.Context, id dsec.SandboxID, user string) (files.FS, error)
	Dial(ctx context.Context, id dsec.SandboxID, port uint16) (net.Conn, error)
	Stats(ctx context.Context, id dsec.SandboxID) (runtime.Stats, error)
	// Changes lists what differs from the layers, at most so many. It works on a
	// disk that is still there, and on one that is gone and was kept.
	Changes(ctx context.Context, id dsec.SandboxID, most int) (dsec.Changes, error)
	// Attach marks the sandbox as in use until the returned func is called.
	Attach(id dsec.SandboxID) (release func())
}

// Watcher streams events.
type Watcher interface {
	// Events calls fn with each event of the sandboxes f selects, beginning
	// with those after the given time, until ctx ends or fn errs. After those that
	// had happened when it was called, and before any other, it calls live,
	// unless that is nil.
	Events(ctx context.Context, f Filter, since time.Time, fn func(dsec.Event) error, live func() error) error
	Load() Load
}

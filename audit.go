package dsec

import (
	"path"
	"strings"
	"time"
)

// AuditKind names what an audit record tells of.
type AuditKind string

// The kinds of this version.
const (
	AuditProcess AuditKind = "process" // a program was started; see AuditRecord for what of it is worth how much
	AuditWrite   AuditKind = "write"   // a watched path was written, replaced, made or removed; Detail says which
	AuditSyscall AuditKind = "syscall" // a system call was refused; Detail names it
	AuditNetwork AuditKind = "network" // the network policy refused packets; Detail is like "tcp 203.0.113.7:443"
	AuditPhase   AuditKind = "phase"   // the sandbox is in another phase, named by Phase
	AuditPolicy  AuditKind = "policy"  // another network policy is in force; Detail is its mode and generation
	AuditNote    AuditKind = "note"    // anything else worth a line
	AuditLost    AuditKind = "lost"    // Count records are missing here, 0: nobody knows how many; Detail says why
)

// What happened to a watched path, in the Detail of an AuditWrite.
const (
	WriteChanged = "written"  // it was open for writing, and was closed
	WriteMade    = "created"  // a name that was not there, or not as a file of this sandbox
	WriteOpened  = "opened"   // a layer's file was opened for writing, or has another mode or owner
	WriteMoved   = "replaced" // something was renamed to it
	WriteRemoved = "removed"  // also: renamed to something else
	WriteDiffers = "differs"  // the disk has its own, whatever trick was used; after a touch or chmod with the layer's contents
)

// AuditRecord is one line of evidence of what happened in a sandbox. Seq counts
// from 1 for each sandbox; where numbers are missing, the log was full there.
//
// PID, UID, GID, Exe, Path, Exec and Time come from the kernel. Args are what the
// program finds as its arguments: the agent's word. An Exe that begins with '~' is of a
// program that ended before its file could be named, and no proof of one: "~/path/as/asked",
// "~./as/asked", or "~name" with its command name.
type AuditRecord struct {
	Seq    uint64    `json:"seq"`
	Time   time.Time `json:"time"`
	Kind   AuditKind `json:"kind"`
	PID    int       `json:"pid,omitempty"`  // inside; 0: not known
	PPID   int       `json:"ppid,omitempty"` // inside; 0: not known, or from outside
	UID    int64     `json:"uid"`            // inside, the real one; -1: not known
	GID    int64     `json:"gid"`
	Exe    string    `json:"exe,omitempty"`
	Args   []string  `json:"args,omitempty"` // cut, see MaxAuditArgs
	Path   string    `json:"path,omitempty"` // inside
	Detail string    `json:"detail,omitempty"`
	Exec   string    `json:"exec,omitempty"` // id of the command that it belongs to; "": not known
	Phase  string    `json:"phase,omitempty"`
	Count  int64     `json:"count,omitempty"` // how often, if more than once; see AuditLost
}

// Caps of a record; longer texts are cut.
const (
	MaxAuditArgs     = 32      // arguments of a record
	MaxAuditArgBytes = 1 << 10 // of all of them together
	MaxAuditText     = 4 << 10 // of another text
	MaxWatch         = 64      // patterns of Spec.Watch
	MaxWatchBytes    = 512     // of one
)

// NobodyID is the UID and GID of a record whose doer is not known.
const NobodyID = -1

// AuditFilter selects records of one sandbox.
type AuditFilter struct {
	Since  uint64      // only those after this one
	Kinds  []AuditKind // none: all
	Follow bool        // go on with what is new, until the sandbox's record is gone
}

// maxStars is how often "**" may be in a pattern; nothing that is watched needs more.
const maxStars = 2

// CheckWatch reports the first pattern that cannot be, as Invalid. Elements are as
// path.Match has them, and "**" stands for any number of them.
func CheckWatch(patterns []string) error {
	const op = "validate spec"
	if len(patterns) > MaxWatch {
		return Errorf(Invalid, op, "watch", "%d patterns, at most %d", len(patterns), MaxWatch)
	}
	for _, p := range patterns {
		if len(p) > MaxWatchBytes || !strings.HasPrefix(p, "/") && !strings.HasPrefix(p, "**/") {
			return Errorf(Invalid, op, "watch", "%s: want /… or **/… of at most %d bytes", Quote(p), MaxWatchBytes)
		}
		if strings.Count(p, "**") > maxStars {
			return Errorf(Invalid, op, "watch", "%s: more than %d times **", Quote(p), maxStars)
		}
		if _, err := path.Match(p, "/"); err != nil {
			return E(Invalid, op, "watch "+Quote(p), err)
		}
	}
	return nil
}

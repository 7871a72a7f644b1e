package dsec

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"path"
	"strings"
	"time"
)

// Scrub says what of a disk shall not be in the layer that is made of it.
// The zero value leaves everything in.
type Scrub struct {
	Histories   bool     `json:"histories,omitempty"`   // of shells and clients
	Credentials bool     `json:"credentials,omitempty"` // keys, passwords and tokens where they usually are
	Caches      bool     `json:"caches,omitempty"`      // what programs can fetch or make again
	Logs        bool     `json:"logs,omitempty"`        // of package managers
	Patterns    []string `json:"patterns,omitempty"`    // globs of whole paths; "**" stands for any number of directories
	Answers     []string `json:"answers,omitempty"`     // SHA-256 of whole files, in hex
}

// Caps on what a Scrub may hold.
const (
	MaxScrubPatterns = 256
	MaxScrubAnswers  = 10_000
)

// ScrubAll is every rule that needs no parameter.
func ScrubAll() Scrub { return Scrub{Histories: true, Credentials: true, Caches: true, Logs: true} }

// Any reports whether anything is asked for.
func (s *Scrub) Any() bool {
	return s.Histories || s.Credentials || s.Caches || s.Logs || len(s.Patterns) > 0 || len(s.Answers) > 0
}

// Validate reports the first thing that can never work.
func (s *Scrub) Validate() error {
	const op = "validate scrub"
	if len(s.Patterns) > MaxScrubPatterns {
		return Errorf(Invalid, op, "patterns", "%d of them, at most %d", len(s.Patterns), MaxScrubPatterns)
	}
	if len(s.Answers) > MaxScrubAnswers {
		return Errorf(Invalid, op, "answers", "%d of them, at most %d", len(s.Answers), MaxScrubAnswers)
	}
	for _, p := range s.Patterns {
		if len(p) > MaxPathBytes || strings.Trim(p, "/") == "" || strings.Contains(p, "\x00") {
			return Errorf(Invalid, op, "patterns", "%s is empty, too long or not a path", Quote(p))
		}
		for part := range strings.SplitSeq(strings.Trim(p, "/"), "/") {
			if _, err := path.Match(part, ""); err != nil || part == "" {
				return Errorf(Invalid, op, "patterns", "%s is malformed", Quote(p))
			}
		}
	}
	for _, a := range s.Answers {
		if b, err := hex.DecodeString(a); err != nil || len(b) != sha256.Size || strings.ToLower(a) != a {
			return Errorf(Invalid, op, "answers", "%s is not a SHA-256 in lower-case hex", Quote(a))
		}
	}
	return nil
}

// Finding is one file that a scrub removed or thinks worth a look. It never
// holds what the file contains.
type Finding struct {
	Path  string `json:"path"` // bytes that are not UTF-8 escaped
	Why   string `json:"why"`
	Size  int64  `json:"size,omitempty"`
	Line  int    `json:"line,omitempty"`  // where in the file; 0: the file as a whole
	Below bool   `json:"below,omitempty"` // a layer below has the path: what it has there is seen again
}

// ScrubReport is what a scrub did. The lists are cut at MaxFindings, the
// counts are not.
type ScrubReport struct {
	Version         int       `json:"version"`
	Rules           Scrub     `json:"rules"`
	Removed         []Finding `json:"removed,omitempty"`
	RemovedCount    int64     `json:"removed_count"`
	RemovedBytes    int64     `json:"removed_bytes"`
	Suspicious      []Finding `json:"suspicious,omitempty"`
	SuspiciousCount int64     `json:"suspicious_count"`
	Unread          int64     `json:"unread,omitempty"` // files not compared with all that goes, or not looked at to their end, because they are too large
}

// Of a ScrubReport.
const (
	ScrubReportVersion = 1
	MaxFindings        = 1000 // in each list
)

// Digest names the report: the SHA-256 of its encoding.
func (r *ScrubReport) Digest() string {
	b, err := json.Marshal(r)
	if err != nil { // plain data
		panic(err)
	}
	sum := sha256.Sum256(b)
	return "sha256:" + hex.EncodeToString(sum[:])
}

// Lineage says where a layer that was packed from a sandbox's disk comes from.
type Lineage struct {
	Version int       `json:"version"`
	Parents []string  `json:"parents"` // digests of the stack it stands on, bottom first
	Sandbox SandboxID `json:"sandbox"`
	Time    time.Time `json:"time"`
	Scrub   string    `json:"scrub,omitempty"`  // digest of the report; absent: it was not scrubbed
	Merged  []string  `json:"merged,omitempty"` // earlier packed layers that this one replaces, bottom first
}

// LineageVersion is of the encoding.
const LineageVersion = 1

// Packed is a layer made of a sandbox's disk.
type Packed struct {
	Digest   string        `json:"digest"`
	Tag      string        `json:"tag,omitempty"`
	Lineage  Lineage       `json:"lineage"`
	Entries  int64         `json:"entries"`
	MetaSize int64         `json:"meta_size"` // bytes
	DataSize int64         `json:"data_size"` // bytes
	Pause    time.Duration `json:"pause"`     // for which the sandbox stood still; 0 if it did not run
	Report   *ScrubReport  `json:"report,omitempty"`
}

// ChangeKind says what happened to a path.
type ChangeKind string

// The kinds, as version control writes them.
const (
	Added    ChangeKind = "A"
	Modified ChangeKind = "M"
	Removed  ChangeKind = "D"
)

// Change is one path that differs from the layers below.
type Change struct {
	Kind ChangeKind `json:"kind"`
	Path string     `json:"path"` // absolute; bytes that are not UTF-8 escaped; a directory ends in "/"
	Size int64      `json:"size"` // bytes now; of a deleted file those it had
	Was  int64      `json:"was"`  // bytes before; 0 if it is new
}

// Changes is the difference between a sandbox's disk and its layers, in the
// order of paths. The list may be cut, the counts are not.
type Changes struct {
	List     []Change `json:"list"`
	Cut      bool     `json:"cut,omitempty"`
	Added    int64    `json:"added"`
	Modified int64    `json:"modified"`
	Deleted  int64    `json:"deleted"`
	Bytes    int64    `json:"bytes"` // in files that are new or modified
}

// MaxChanges is the most that Changes lists.
const MaxChanges = 100_000

package dsec

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"path"
	"slices"
	"strings"
	"time"
	"unicode/utf8"
)

// GradeWhere is where a grader runs.
type GradeWhere string

// The places.
const (
	GradeFresh GradeWhere = "fresh" // in a new sandbox that never ran what the agent left running; the default
	GradeSame  GradeWhere = "same"  // in the sandbox itself, when what the grader stands on is as in its layers
)

// GradeSpec is what a grading is asked to do; see docs/formats/grade.md.
type GradeSpec struct {
	Where   GradeWhere        `json:"where,omitempty"`
	Command []string          `json:"command"`           // the grader; it ends with 0 after it wrote the reward
	Paths   []string          `json:"paths,omitempty"`   // declared: what the agent was asked to make, absolute and clean; none: the working directory
	Exclude []string          `json:"exclude,omitempty"` // globs of whole paths that are not taken; "**" stands for any number of directories
	Env     map[string]string `json:"env,omitempty"`     // added to the sandbox's
	Workdir string            `json:"workdir,omitempty"` // "": the sandbox's
	User    string            `json:"user,omitempty"`    // "": GraderUser
	Timeout time.Duration     `json:"timeout,omitempty"` // 0: 10 min
	Layers  []LayerRef        `json:"layers,omitempty"`  // that only the grader gets, above those of the sandbox; nothing declared covers what is in them
	Files   map[string][]byte `json:"files,omitempty"`   // that only the grader gets, by path, 0644, root's
	Network NetworkMode       `json:"network,omitempty"` // "": none
	Allow   []NetworkRule     `json:"allow,omitempty"`
	Limits  Limits            `json:"limits"`           // zero fields: those of the sandbox
	Verify  []string          `json:"verify,omitempty"` // of same: what else must be as in the layers
}

// What a grader finds.
const (
	// GraderUser is nobody else's: no account and no file of an image has it.
	GraderUser = "60606:60606"
	// GradeDir is the grader's, 0700; the platform makes it when what was declared is in place.
	GradeDir = "/run/dsec-grade"
	// RewardPath is where the grader writes the reward; DSEC_REWARD in its environment.
	RewardPath = GradeDir + "/reward"
)

// Caps on a GradeSpec and on what a grading moves.
const (
	MaxGradePaths  = 64        // of each list
	MaxGradeFiles  = 1 << 20   // bytes of the files that only the grader gets
	MaxGradeWord   = 128 << 10 // of the command, as the kernel has it
	MaxGradeTime   = 25 * time.Minute
	MaxGradeBytes  = 4 << 30 // of declared files, holes counted
	MaxGradeCount  = 200_000 // declared entries
	MaxReward      = 64 << 10
	DefaultGrading = 10 * time.Minute
)

// Validate reports the first thing in s that can never work.
func (s *GradeSpec) Validate() error {
	bad := func(field, format string, args ...any) error {
		return Errorf(Invalid, "validate grading", field, format, args...)
	}
	if s.Where != "" && s.Where != GradeFresh && s.Where != GradeSame {
		return bad("where", "unknown place %s, want fresh or same", Quote(string(s.Where)))
	}
	if len(s.Command) == 0 {
		return bad("command", "is required")
	}
	if s.Timeout < 0 || s.Timeout > MaxGradeTime {
		return bad("timeout", "%v, want 0 to %v", s.Timeout, MaxGradeTime)
	}
	if s.Where == GradeSame && (len(s.Layers) > 0 || s.Network != "" || s.Limits != Limits{} || len(s.Paths)+len(s.Exclude) > 0) {
		return bad("where", "paths, exclude, layers, network and limits are of a fresh sandbox, not of the same")
	}
	if s.Where != GradeSame && len(s.Verify) > 0 {
		return bad("verify", "is of grading in the same sandbox: a fresh one is as its layers are")
	}
	for field, list := range map[string][]string{"paths": s.Paths, "verify": s.Verify} {
		if len(list) > MaxGradePaths {
			return bad(field, "%d of them, at most %d", len(list), MaxGradePaths)
		}
		for _, p := range list {
			if err := gradePath(field, p); err != nil {
				return err
			}
		}
	}
	for _, p := range s.Paths {
		if p == "/" {
			return bad("paths", "the root is not a declared path: name what the agent was asked to make")
		}
	}
	if len(s.Exclude) > 0 {
		if err := (&Scrub{Patterns: s.Exclude}).Validate(); err != nil {
			return bad("exclude", "%w", err)
		}
	}
	return s.validateRest(bad)
}

func (s *GradeSpec) validateRest(bad func(field, format string, args ...any) error) error {
	total := 0
	for p, b := range s.Files {
		if err := gradePath("files", p); err != nil {
			return err
		}
		if p == RewardPath {
			return bad("files", "%s is for the grader to write", p)
		}
		total += len(p) + len(b)
	}
	if total > MaxGradeFiles {
		return bad("files", "%d bytes, at most %d", total, MaxGradeFiles)
	}
	if len(s.Files) > MaxGradePaths {
		return bad("files", "%d of them, at most %d", len(s.Files), MaxGradePaths)
	}
	// What else there is, it shares with a sandbox.
	box := Spec{Tier: TierContainer, Image: "-", Command: s.Command, Env: s.Env, Workdir: s.Workdir, User: s.User, Layers: s.Layers,
		Network: s.Network, Allow: s.Allow, Limits: s.Limits}
	return box.Validate()
}

// gradePath wants a path that is what it looks like, outside the grader's directory.
func gradePath(field, p string) error {
	switch {
	case len(p) > MaxPathBytes || !strings.HasPrefix(p, "/") || path.Clean(p) != p || strings.Contains(p, "\x00"):
		return Errorf(Invalid, "validate grading", field, "%s is not an absolute, clean path", Quote(p))
	case field == "paths" && Within(p, GradeDir):
		return Errorf(Invalid, "validate grading", field, "%s is the grader's", Quote(p))
	}
	return nil
}

// Within says whether a clean path is dir or below it.
func Within(p, dir string) bool {
	return p == dir || dir == "/" || strings.HasPrefix(p, dir+"/")
}

// Applied is what of the declared paths came into a fresh sandbox.
type Applied struct {
	Files   int64 `json:"files"` // entries, directories too
	Bytes   int64 `json:"bytes"`
	Removed int64 `json:"removed"` // paths that the agent had removed
	Refused int64 `json:"refused"` // entries of other kinds, or that only the grader may give
}

// GradeResult is what a grading found. Only with cause completed it has a
// reward; what went wrong with the grader is never a reward of 0.
type GradeResult struct {
	Reward   *float64        `json:"reward,omitempty"`
	Details  json.RawMessage `json:"details,omitempty"` // the object that the grader wrote, if it was one
	Cause    Cause           `json:"cause"`             // completed, grader_error, grader_timeout, agent_error (what it left cannot be taken), infra_…
	Where    GradeWhere      `json:"where"`
	Sandbox  SandboxID       `json:"sandbox"` // in which the grader ran; a fresh one is gone, its record is not
	ExitCode int             `json:"exit_code"`
	Output   []byte          `json:"output,omitempty"` // the end of what the grader said, stdout before stderr
	Evidence []string        `json:"evidence,omitempty"`
	Tampered bool            `json:"tampered,omitempty"` // of same: what the grader stands on is not as in the layers
	Applied  Applied         `json:"applied"`
	Time     time.Time       `json:"time"`
	Wall     time.Duration   `json:"wall"` // of the grader
}

// ParseReward reads what a grader wrote: a JSON number, or an object with a
// finite number under "reward", which is returned as details.
func ParseReward(b []byte) (reward float64, details json.RawMessage, err error) {
	b = bytes.TrimSpace(b)
	switch {
	case len(b) == 0:
		return 0, nil, errors.New("it is empty")
	case len(b) > MaxReward:
		return 0, nil, fmt.Errorf("%d bytes, at most %d", len(b), MaxReward)
	case !utf8.Valid(b):
		return 0, nil, errors.New("it is not UTF-8")
	case b[0] == '{':
		return parseRewardObject(b)
	}
	if err := json.Unmarshal(b, &reward); err != nil || b[0] == 'n' {
		return 0, nil, errors.New("neither a JSON number nor an object with one")
	}
	return finite(reward, nil)
}

// parseRewardObject wants each key once: of two rewards neither is the one.
func parseRewardObject(b []byte) (float64, json.RawMessage, error) {
	d := json.NewDecoder(bytes.NewReader(b))
	var rewards []float64
	if _, err := d.Token(); err != nil { // the brace
		return 0, nil, err
	}
	for d.More() {
		key, err := d.Token()
		if err != nil {
			return 0, nil, fmt.Errorf("malformed JSON: %w", err)
		}
		var value json.RawMessage
		if err := d.Decode(&value); err != nil {
			return 0, nil, fmt.Errorf("malformed JSON: %w", err)
		}
		if key != "reward" {
			continue
		}
		var r float64
		if err := json.Unmarshal(value, &r); err != nil || string(value) == "null" {
			return 0, nil, errors.New(`"reward" is not a number`)
		}
		rewards = append(rewards, r)
	}
	if _, err := d.Token(); err != nil {
		return 0, nil, fmt.Errorf("malformed JSON: %w", err)
	}
	if _, err := d.Token(); err != io.EOF {
		return 0, nil, errors.New("bytes after the object")
	}
	if len(rewards) != 1 {
		return 0, nil, fmt.Errorf(`%d numbers under "reward", want one`, len(rewards))
	}
	return finite(rewards[0], slices.Clone(b))
}

func finite(r float64, details json.RawMessage) (float64, json.RawMessage, error) {
	if math.IsNaN(r) || math.IsInf(r, 0) {
		return 0, nil, errors.New("the reward is not finite")
	}
	return r, details, nil
}

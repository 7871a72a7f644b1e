package node

import (
	"bytes"
	"encoding/json"
	"slices"
	"time"

	"github.com/opendsec/dsec"
)

// recordVersion is the first byte of an encoded record, see docs/formats/record.md.
const recordVersion = 1

// Bounds of what a record keeps of a sandbox's doings.
const (
	recordEvents  = 32       // last events
	recordOutputs = 8        // last ended commands
	outputTail    = 2 << 10  // bytes of each stream of a command
	maxArgv       = 512      // bytes of a command line
	maxRecord     = 16 << 20 // bytes that a decoder accepts, and that are written
)

// Intents: what was begun, and is finished or undone by whoever finds it.
const (
	intentNone    = ""
	intentCreate  = "create"  // undo: destroy, release
	intentStart   = "start"   // undo: stop
	intentStop    = "stop"    // finish
	intentDestroy = "destroy" // finish
)

// record is what the ledger knows of a sandbox.
type record struct {
	ID       dsec.SandboxID `json:"id"`
	Project  string         `json:"project"`
	Spec     dsec.Spec      `json:"spec"`
	State    dsec.State     `json:"state"`
	Intent   string         `json:"intent,omitempty"`
	Result   *dsec.Result   `json:"result,omitempty"`
	Digests  []string       `json:"digests,omitempty"`
	Created  time.Time      `json:"created"`
	Changed  time.Time      `json:"changed"`
	Ended    time.Time      `json:"ended,omitzero"`   // when it was known to have no processes any more
	Expires  time.Time      `json:"expires,omitzero"` // end of its lifetime
	Active   time.Time      `json:"active,omitzero"`  // last activity known
	Started  time.Time      `json:"started,omitzero"` // of this run
	Starts   int            `json:"starts"`
	Steps    []dsec.Step    `json:"steps,omitempty"`
	Usage    dsec.Usage     `json:"usage"` // of finished runs
	Seq      uint64         `json:"seq"`   // of the last event
	Events   []dsec.Event   `json:"events,omitempty"`
	Outputs  []output       `json:"outputs,omitempty"`
	SpecHash string         `json:"spec_hash,omitempty"` // of the spec as it was asked for
	Kept     *Kept          `json:"kept,omitempty"`      // its disk
	Blame    *dsec.Blame    `json:"blame,omitempty"`

	Network *dsec.NetworkState `json:"network,omitempty"` // in force since it was changed
	Phase   *dsec.PhaseState   `json:"phase,omitempty"`   // in force; nil: it has none

	Grades   []dsec.GradeResult `json:"grades,omitempty"`    // the last ones
	GraderOf dsec.SandboxID     `json:"grader_of,omitempty"` // it is the sandbox of a grader
}

// output is what is left of a command.
type output struct {
	Exec    string    `json:"exec"`
	Argv    string    `json:"argv"` // shortened
	Status  string    `json:"status"`
	Code    int       `json:"code"`
	OOM     bool      `json:"oom,omitempty"`
	Started time.Time `json:"started"`
	Wall    float64   `json:"wall"` // seconds
	Stdout  []byte    `json:"stdout,omitempty"`
	Stderr  []byte    `json:"stderr,omitempty"`
	Total   int64     `json:"total"` // bytes written to both

	Blame dsec.Cause `json:"blame,omitempty"` // as of process.Result
	Phase string     `json:"phase,omitempty"` // that it began in
}

// write is encode of what a decoder will read: a record that is too large must
// never be written.
func (r *record) write() ([]byte, error) {
	b := r.encode()
	if len(b) > maxRecord {
		return nil, dsec.Errorf(dsec.Invalid, "write record", string(r.ID), "%d bytes, at most %d", len(b), maxRecord)
	}
	return b, nil
}

func (r *record) encode() []byte {
	b, err := json.Marshal(r)
	if err != nil { // plain data
		panic(err)
	}
	return append([]byte{recordVersion}, b...)
}

// decodeRecord reads an encoded record.
func decodeRecord(b []byte) (*record, error) {
	r := &record{}
	if err := decodeValue("record", recordVersion, b, r); err != nil {
		return nil, err
	}
	bad := func(format string, args ...any) (*record, error) {
		return nil, dsec.Errorf(dsec.Corrupt, "read record", "", format, args...)
	}
	if _, _, err := dsec.ParseSandboxID(string(r.ID)); err != nil {
		return bad("%w", err)
	}
	if !slices.Contains(dsec.States, r.State) {
		return bad("unknown state %s", dsec.Quote(string(r.State)))
	}
	return r, nil
}

// decodeValue reads what the ledger has under a key: a version and JSON.
func decodeValue(what string, version byte, b []byte, into any) error {
	bad := func(format string, args ...any) error {
		return dsec.Errorf(dsec.Corrupt, "read "+what, "", format, args...)
	}
	switch {
	case len(b) == 0:
		return bad("empty")
	case len(b) > maxRecord:
		return bad("%d bytes, at most %d", len(b), maxRecord)
	case b[0] != version:
		return bad("version %d, this program reads %d", b[0], version)
	}
	d := json.NewDecoder(bytes.NewReader(b[1:]))
	if err := d.Decode(into); err != nil {
		return bad("%w", err)
	}
	if d.More() {
		return bad("bytes after the %s", what)
	}
	return nil
}

// sandbox is the record as the service tells it.
func (r *record) sandbox() Sandbox {
	s := Sandbox{ID: r.ID, Project: r.Project, Spec: r.Spec, State: r.State, Digests: slices.Clone(r.Digests), Created: r.Created,
		Changed: r.Changed, Expires: r.Expires, Starts: r.Starts, Steps: slices.Clone(r.Steps), Network: r.Network, Phase: r.Phase, Grades: slices.Clone(r.Grades)}
	if r.Result != nil {
		res := *r.Result
		s.Result = &res
	}
	if r.Blame != nil {
		blame := *r.Blame
		s.Blame = &blame
	}
	if r.Kept != nil {
		kept := *r.Kept
		s.Kept = &kept
	}
	return s
}

// matches reports whether a filter selects the record.
func (f *Filter) matches(r *record) bool {
	if f.Project != "" && f.Project != r.Project || f.Rollout != "" && f.Rollout != r.Spec.RolloutKey {
		return false
	}
	if len(f.States) > 0 && !slices.Contains(f.States, r.State) {
		return false
	}
	for k, v := range f.Labels {
		if have, ok := r.Spec.Labels[k]; !ok || have != v {
			return false
		}
	}
	return true
}

// read returns nil for a record that cannot be read, which is said once and
// counted.
func (l *ledger) read(id, b []byte) *record {
	r, err := decodeRecord(b)
	if err == nil {
		return r
	}
	if _, said := l.unreadable.LoadOrStore(string(id), true); !said {
		l.metrics.unreadable.Inc()
		l.log.Error("record passed over", "sandbox", string(id), "bytes", len(b), "err", err)
	}
	return nil
}

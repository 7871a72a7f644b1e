package gvisor

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/runtime"
	"github.com/opendsec/dsec/runtime/tier"
)

// recordVersion is the first byte of a state file; see docs/formats/gvisor-state.md.
const recordVersion = '1'

const (
	maxRecord = 4 << 20
	stateFile = "state"
)

// record is what survives this process.
type record struct {
	Request runtime.Request `json:"request"`
	UID     uint32          `json:"uid"`     // first uid and gid on the machine
	Image   string          `json:"image"`   // its name in the store of images
	Begun   time.Time       `json:"begun"`   // of the last creation or start
	Starts  int             `json:"starts"`  // 1 after creation
	Stopped bool            `json:"stopped"` //
	// Still is set before a sandbox is paused, and cleared after it went on.
	Still bool `json:"still,omitempty"`
	// Network is the policy that was set after creation; nil: as in the request.
	Network *dsec.NetworkPolicy `json:"network,omitempty"`
	Last    *runtime.Stats      `json:"last,omitempty"` // when it stopped
}

func (r *record) encode() ([]byte, error) { return tier.EncodeState(recordVersion, r) }

func decodeRecord(b []byte) (*record, error) {
	r := &record{}
	if err := tier.DecodeState(b, recordVersion, r); err != nil {
		return nil, err
	}
	if r.Starts < 1 || r.UID == 0 {
		return nil, errors.New("starts and uid have to be positive")
	}
	return r, nil
}

// writeRecord replaces the state file. It is not synced: after a power loss the sandbox
// is gone whatever its state file says.
func writeRecord(dir string, r *record) error {
	b, err := r.encode()
	if err != nil {
		return err
	}
	tmp := filepath.Join(dir, stateFile+".new")
	if err := os.WriteFile(tmp, b, 0o600); err != nil {
		return err
	}
	return os.Rename(tmp, filepath.Join(dir, stateFile))
}

func readRecord(dir string, id dsec.SandboxID) (*record, error) {
	const op = "read state of sandbox"
	f, err := os.Open(filepath.Join(dir, stateFile))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxRecord))
	if err != nil {
		return nil, err
	}
	r, err := decodeRecord(b)
	switch {
	case errors.Is(err, tier.ErrVersion):
		return nil, dsec.E(dsec.Unsupported, op, string(id), err)
	case err != nil:
		return nil, dsec.E(dsec.Corrupt, op, string(id), err)
	case r.Request.ID != id:
		return nil, dsec.Errorf(dsec.Corrupt, op, string(id), "it is of %s", dsec.Quote(string(r.Request.ID)))
	}
	return r, nil
}

// policy is what is in force, or comes into force at the next start.
func (r *record) policy() dsec.NetworkPolicy {
	if r.Network != nil {
		return *r.Network
	}
	return r.Request.Spec.PolicyIn(0)
}

package container

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

// recordVersion is the first byte of a state file; see docs/formats/container-state.md.
const recordVersion = '1'

// maxRecord bounds what is read back: a request holds at most 64 layers and 256 KiB of environment.
const maxRecord = 4 << 20

const stateFile = "state"

// record is what survives this process.
type record struct {
	Request runtime.Request `json:"request"`
	UID     uint32          `json:"uid"`             // first uid and gid on the machine
	Shell   string          `json:"shell,omitempty"` // whose group it lives in, and its id in the hold until Enter; none: its own
	// AppArmor is the profile of its processes; "": it was begun without AppArmor.
	AppArmor string    `json:"apparmor,omitempty"`
	Begun    time.Time `json:"begun"`  // of the last creation or start
	Starts   int       `json:"starts"` // 1 after creation
	Stopped  bool      `json:"stopped"`
	// Network is the policy that was set after creation; nil: as in the request.
	Network *dsec.NetworkPolicy `json:"network,omitempty"`
	// Phase is the one in force, Moving the one that a move has begun to; Bound are the
	// paths that have mounts of ours on them, or may have.
	Phase  string   `json:"phase,omitempty"`
	Moving string   `json:"moving,omitempty"`
	Bound  []string `json:"bound,omitempty"`
	// Settled is Starts when the phase had come into force, before anything ran.
	Settled int `json:"settled,omitempty"`
	// Services are commands that outlive the first phase, by their ids.
	Services []string `json:"services,omitempty"`
	// Users are the uids that phases name, as the layers had them.
	Users map[string]uint32 `json:"users,omitempty"`

	Still bool           `json:"still,omitempty"` // frozen for a moment: whoever finds it so thaws it
	Last  *runtime.Stats `json:"last,omitempty"`  // when it stopped
}

// group is the name of the control group.
func (r *record) group() string {
	if r.Shell != "" {
		return r.Shell
	}
	return string(r.Request.ID)
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

// writeNewRecord writes the first state file. A process that is killed while
// it does leaves a broken one, of a sandbox that has nothing else yet.
func writeNewRecord(dir string, r *record) error {
	b, err := r.encode()
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, stateFile), b, 0o600)
}

// writeRecord replaces the state file. It is not synced: after a power loss
// the sandbox is gone whatever its state file says.
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
	if errors.Is(err, tier.ErrVersion) {
		return nil, dsec.E(dsec.Unsupported, "read state of sandbox", string(id), err)
	}
	if err != nil {
		return nil, dsec.E(dsec.Corrupt, "read state of sandbox", string(id), err)
	}
	if r.Request.ID != id {
		return nil, dsec.Errorf(dsec.Corrupt, "read state of sandbox", string(id), "it is of %s", dsec.Quote(string(r.Request.ID)))
	}
	return r, nil
}

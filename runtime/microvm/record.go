package microvm

import (
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/runtime"
	"github.com/opendsec/dsec/runtime/tier"
)

// recordVersion is the first byte of a state file; see docs/formats/microvm-state.md.
const recordVersion = '1'

// maxRecord bounds what is read back: a request holds at most 64 layers and 256 KiB of environment.
const maxRecord = 4 << 20

const (
	stateFile = "state"
	exitFile  = "exit" // of a sandbox that ended by itself, until that is acknowledged
)

// record is what survives this process.
type record struct {
	Request runtime.Request `json:"request"`
	Begun   time.Time       `json:"begun"` // of the last creation or start
	Starts  int             `json:"starts"`
	Ready   int             `json:"ready,omitempty"` // Starts when that had come to its end
	Stopped bool            `json:"stopped,omitempty"`

	Suspended bool     `json:"suspended,omitempty"` // its machine is on disk, and nowhere else
	Execs     []string `json:"execs,omitempty"`     // then

	CPU       time.Duration `json:"cpu,omitempty"`       // used since it started, before it was suspended
	Throttled time.Duration `json:"throttled,omitempty"` // likewise

	MachineID string              `json:"machine_id"`
	Read      []bool              `json:"read,omitempty"`    // of each layer: its data are a disk of the machine, and not mapped
	Lease     *lease              `json:"lease,omitempty"`   // of its network, if it has one
	Network   *dsec.NetworkPolicy `json:"network,omitempty"` // set after creation; nil: as in the request
	Last      *runtime.Stats      `json:"last,omitempty"`    // when it stopped
}

func (r *record) encode() ([]byte, error) { return tier.EncodeState(recordVersion, r) }

func decodeRecord(b []byte) (*record, error) {
	r := &record{}
	if err := tier.DecodeState(b, recordVersion, r); err != nil {
		return nil, err
	}
	if r.Starts < 1 || r.Ready > r.Starts {
		return nil, errors.New("starts have to be positive, and ready no more")
	}
	return r, nil
}

// writeRecord replaces the state file, or makes it. That of a suspended sandbox is synced; of
// another one it is not: after a power loss it is gone whatever its state file says.
func writeRecord(dir string, r *record) error {
	b, err := r.encode()
	if err != nil {
		return err
	}
	tmp := filepath.Join(dir, stateFile+".new")
	f, err := os.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	if err == nil && r.Suspended {
		err = f.Sync()
	}
	if err := errors.Join(err, f.Close()); err != nil {
		return err
	}
	if err := os.Rename(tmp, filepath.Join(dir, stateFile)); err != nil || !r.Suspended {
		return err
	}
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

func readRecord(dir string, id dsec.SandboxID) (*record, error) {
	const op = "read state of sandbox"
	f, err := os.Open(filepath.Join(dir, stateFile))
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	b, err := io.ReadAll(io.LimitReader(f, maxRecord))
	if err != nil {
		return nil, err
	}
	r, err := decodeRecord(b)
	if errors.Is(err, tier.ErrVersion) {
		return nil, dsec.E(dsec.Unsupported, op, string(id), err)
	}
	if err != nil {
		return nil, dsec.E(dsec.Corrupt, op, string(id), err)
	}
	if r.Request.ID != id {
		return nil, dsec.Errorf(dsec.Corrupt, op, string(id), "it is of %s", dsec.Quote(string(r.Request.ID)))
	}
	return r, nil
}

// rewrite changes the record of a sandbox, on disk and here. The turn is held.
func (r *Runtime) rewrite(sb *sandbox, change func(*record)) error {
	was := sb.record()
	if was == nil {
		return dsec.Errorf(dsec.SandboxGone, "write state of sandbox", string(sb.ID), "the sandbox is being removed")
	}
	rec := *was
	change(&rec)
	if err := writeRecord(r.dir(sb.ID), &rec); err != nil {
		return dsec.E(dsec.Internal, "write state of sandbox", string(sb.ID), err)
	}
	sb.Mu.Lock()
	defer sb.Mu.Unlock()
	sb.rec = &rec
	return nil
}

// writeExit notes how a sandbox ended.
func writeExit(dir string, x runtime.Exit) error {
	b, err := json.Marshal(x)
	if err != nil {
		return err
	}
	tmp := filepath.Join(dir, exitFile+".new")
	if err := os.WriteFile(tmp, b, 0o600); err != nil {
		return err
	}
	return os.Rename(tmp, filepath.Join(dir, exitFile))
}

// readExit returns nil if there is none, and what can be said if it cannot be read.
func readExit(dir string, id dsec.SandboxID) *runtime.Exit {
	b, err := os.ReadFile(filepath.Join(dir, exitFile))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	x := &runtime.Exit{}
	if err == nil {
		err = json.Unmarshal(b, x)
	}
	if err != nil {
		x = &runtime.Exit{Cause: dsec.CauseUnknown, By: dsec.InducedByUnknown, Evidence: []string{"it ended, and how is not known any more: " + err.Error()}}
	}
	x.ID = id
	return x
}

func forgetExit(dir string) error {
	err := os.Remove(filepath.Join(dir, exitFile))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return dsec.E(dsec.Internal, "forget end of sandbox", filepath.Base(dir), err)
	}
	return nil
}

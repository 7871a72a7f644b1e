package fullvm

import (
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/diskimage"
	"github.com/opendsec/dsec/internal/fault"
	"github.com/opendsec/dsec/runtime"
)

const (
	recordFormat = 1
	stateFile    = "state.json"
	maxRecord    = 4 << 20
)

// record is what survives this process.
type record struct {
	Format  int                `json:"format"`
	Request runtime.Request    `json:"request"`
	Image   diskimage.Manifest `json:"image,omitzero"` // once it was looked at
	Starts  int                `json:"starts"`         // 1 after creation
	Made    int                `json:"made"`           // the last start that came to its end
	Begun   time.Time          `json:"begun"`          // of the last creation or start
	Stopped bool               `json:"stopped,omitempty"`
	Paused  bool               `json:"paused,omitempty"`
	Exit    *runtime.Exit      `json:"exit,omitempty"` // not acknowledged
	Last    *runtime.Stats     `json:"last,omitempty"` // when it stopped
}

func (r *Runtime) write(rec *record) error {
	const op = "write state of sandbox"
	id := rec.Request.ID
	b, err := json.Marshal(rec)
	if err != nil {
		return dsec.E(dsec.Internal, op, string(id), err)
	}
	tmp := filepath.Join(r.dir(id), stateFile+".new")
	if err := os.WriteFile(tmp, b, 0o600); err != nil {
		return dsec.E(fault.Class(err, dsec.Internal), op, string(id), errors.Join(err, removed(tmp)))
	}
	if err := os.Rename(tmp, filepath.Join(r.dir(id), stateFile)); err != nil {
		return dsec.E(fault.Class(err, dsec.Internal), op, string(id), err)
	}
	return nil
}

// removed removes what may not be there.
func removed(name string) error {
	if err := os.Remove(name); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// change writes a changed copy of the record, and makes it that of the sandbox.
func (r *Runtime) change(sb *sandbox, f func(rec *record)) error {
	sb.Mu.Lock()
	defer sb.Mu.Unlock()
	if sb.rec == nil {
		return dsec.Errorf(dsec.NotFound, "write state of sandbox", string(sb.ID), "no such sandbox")
	}
	rec := *sb.rec
	f(&rec)
	if err := r.write(&rec); err != nil {
		return err
	}
	sb.rec = &rec
	return nil
}

// readRecord of a sandbox; the error is os.ErrNotExist if there is none.
func (r *Runtime) readRecord(id dsec.SandboxID) (*record, error) {
	const op = "read state of sandbox"
	f, err := os.Open(filepath.Join(r.dir(id), stateFile))
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	b, err := io.ReadAll(io.LimitReader(f, maxRecord))
	if err != nil {
		return nil, dsec.E(dsec.Internal, op, string(id), err)
	}
	rec := &record{}
	switch err := json.Unmarshal(b, rec); {
	case err != nil:
		return nil, dsec.E(dsec.Corrupt, op, string(id), err)
	case rec.Format != recordFormat:
		return nil, dsec.Errorf(dsec.Unsupported, op, string(id), "format %d, this version of dsec knows %d", rec.Format, recordFormat)
	case rec.Request.ID != id || rec.Starts < 1:
		return nil, dsec.Errorf(dsec.Corrupt, op, string(id), "it is of %s", dsec.Quote(string(rec.Request.ID)))
	}
	return rec, nil
}

// removeState is the end of a sandbox.
func (r *Runtime) removeState(id dsec.SandboxID) error {
	if err := os.RemoveAll(r.dir(id)); err != nil {
		return dsec.E(dsec.Internal, "remove state of sandbox", string(id), err)
	}
	return nil
}

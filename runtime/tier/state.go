package tier

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/runtime"
)

// ErrVersion: another version of dsec wrote it, which is no reason to remove it.
var ErrVersion = errors.New("version")

// EncodeState makes the content of a state file: its version, a line feed and v as JSON.
func EncodeState(version byte, v any) ([]byte, error) {
	b, err := json.Marshal(v)
	if err != nil {
		return nil, err
	}
	return append([]byte{version, '\n'}, b...), nil
}

// DecodeState reads what EncodeState made. An error is an ErrVersion where that is why.
func DecodeState(b []byte, version byte, v any) error {
	if len(b) < 2 || b[1] != '\n' {
		return errors.New("not a state file")
	}
	if b[0] != version {
		return fmt.Errorf("%w %q, want %q", ErrVersion, b[0], version)
	}
	return json.Unmarshal(b[2:], v)
}

// SameRequest is nil if a sandbox that exists was asked for as it is now; Conflict if not.
func SameRequest(op string, was, now runtime.Request) error {
	a, aerr := json.Marshal(was)
	b, berr := json.Marshal(now)
	if err := errors.Join(aerr, berr); err != nil {
		return dsec.E(dsec.Internal, op, string(now.ID), err)
	}
	if !bytes.Equal(a, b) {
		return dsec.Errorf(dsec.Conflict, op, string(now.ID), "it exists and was asked for differently")
	}
	return nil
}

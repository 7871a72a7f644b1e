package egress

import (
	"encoding/binary"
	"encoding/json"
	"io"
	"net/netip"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/netpolicy"
)

// Version of what agent and server say to each other; a server of another one ends
// itself, for one that is as new as the agent to take its place.
const Version = 1

// maxFrame is more than the largest that valid lets through.
const maxFrame = 4 << 20

// Requests.
const (
	opGreet     = "greet"
	opSet       = "set"
	opPin       = "pin"
	opForget    = "forget"
	opAddresses = "addresses"
	opGet       = "get"
	opAudit     = "audit"
	opWatch     = "watch"
)

type request struct {
	Op        string              `json:"op"`
	Version   int                 `json:"version,omitempty"` // greet
	Listen    netip.AddrPort      `json:"listen,omitzero"`   // greet
	Conns     int                 `json:"conns,omitempty"`   // greet; of one sandbox
	Admitted  *netpolicy.Admitted `json:"admitted,omitempty"`
	Sandbox   netip.Addr          `json:"sandbox,omitzero"`
	ID        dsec.SandboxID      `json:"id,omitempty"` // forget
	Name      string              `json:"name,omitempty"`
	Addresses []netip.Addr        `json:"addresses,omitempty"`
}

type reply struct {
	Class     dsec.Class          `json:"class,omitempty"` // of an error
	Error     string              `json:"error,omitempty"`
	Addresses []netip.Addr        `json:"addresses,omitempty"`
	Admitted  *netpolicy.Admitted `json:"admitted,omitempty"`
	Rows      []dsec.EgressRow    `json:"rows,omitempty"`
	Refusal   *Refusal            `json:"refusal,omitempty"` // after watch, without an end
}

func (r reply) err() error {
	if r.Error == "" {
		return nil
	}
	return dsec.Errorf(r.Class, "ask egress", "", "%s", r.Error)
}

// encode makes a frame: u32 length, big endian, and JSON.
func encode(v any) ([]byte, error) {
	text, err := json.Marshal(v)
	if err != nil {
		return nil, err
	}
	if len(text) > maxFrame {
		return nil, dsec.Errorf(dsec.ResourceExhausted, "write frame", "", "%d bytes, at most %d", len(text), maxFrame)
	}
	return append(binary.BigEndian.AppendUint32(nil, uint32(len(text))), text...), nil
}

func write(w io.Writer, v any) error {
	b, err := encode(v)
	if err == nil {
		_, err = w.Write(b)
	}
	return err
}

func read(r io.Reader, v any) error {
	var size [4]byte
	if _, err := io.ReadFull(r, size[:]); err != nil {
		return err
	}
	n := binary.BigEndian.Uint32(size[:])
	if n > maxFrame {
		return dsec.Errorf(dsec.Invalid, "read frame", "", "%d bytes, at most %d", n, maxFrame)
	}
	b := make([]byte, n)
	if _, err := io.ReadFull(r, b); err != nil {
		return err
	}
	return json.Unmarshal(b, v)
}

// readRequest is read of what came from outside.
func readRequest(r io.Reader) (q request, err error) {
	if err = read(r, &q); err != nil {
		return q, err
	}
	if q.Admitted != nil {
		err = valid(*q.Admitted)
	}
	if len(q.Addresses) > maxAddresses || len(q.Name) > maxName {
		err = dsec.Errorf(dsec.Invalid, "read request", q.Op, "%d addresses of a name of %d bytes", len(q.Addresses), len(q.Name))
	}
	return q, err
}

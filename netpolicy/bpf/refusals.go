package bpf

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"github.com/cilium/ebpf/ringbuf"

	"github.com/opendsec/dsec/netpolicy"
)

// Refusals implements netpolicy.Gate.
func (g *Gate) Refusals(take func(netpolicy.Refusal)) (stop func(), err error) {
	r, err := ringbuf.NewReader(g.maps.Events)
	if err != nil {
		return nil, fmt.Errorf("read refusals: %w", err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			rec, err := r.Read()
			if errors.Is(err, ringbuf.ErrClosed) {
				return
			}
			if err == nil && len(rec.RawSample) >= eventSize {
				take(decodeRefusal(rec.RawSample))
			}
		}
	}()
	return func() { _ = r.Close(); <-done }, nil
}

func decodeRefusal(b []byte) netpolicy.Refusal {
	a, _ := netip.AddrFromSlice(b[4:8])
	r := netpolicy.Refusal{Link: int(binary.NativeEndian.Uint32(b)), Address: a, Generation: binary.NativeEndian.Uint64(b[8:]), Protocol: uint8(binary.NativeEndian.Uint32(b[20:]))}
	if port := binary.NativeEndian.Uint32(b[16:]); port != laterFragment {
		r.Port = uint16(port)
	}
	if len(b) >= trySize {
		r.PID, r.UID = int(binary.NativeEndian.Uint32(b[tryPID:])), binary.NativeEndian.Uint32(b[tryUID:])
		name, _, _ := bytes.Cut(b[tryName:trySize], []byte{0})
		r.Program = string(name)
	}
	return r
}

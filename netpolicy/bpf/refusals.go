package bpf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"github.com/cilium/ebpf/ringbuf"
)

// Refusal is a packet that no plan opens.
type Refusal struct {
	Link       int
	Address    netip.Addr
	Protocol   uint8
	Port       uint16 // 0 of what has none
	Generation uint64 // of the link's plan
}

// Refusals gives each one as it comes, one at a time, until stop. Those that come
// faster than they are taken are only counted.
func (g *Gate) Refusals(take func(Refusal)) (stop func(), err error) {
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

func decodeRefusal(b []byte) Refusal {
	a, _ := netip.AddrFromSlice(b[4:8])
	r := Refusal{Link: int(binary.NativeEndian.Uint32(b)), Address: a, Generation: binary.NativeEndian.Uint64(b[8:]), Protocol: uint8(binary.NativeEndian.Uint32(b[20:]))}
	if port := binary.NativeEndian.Uint32(b[16:]); port != laterFragment {
		r.Port = uint16(port)
	}
	return r
}

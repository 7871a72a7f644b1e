package bpf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/cilium/ebpf"

	"github.com/opendsec/dsec/netpolicy"
)

// Pin implements netpolicy.Gate.
func (g *Gate) Pin(link int, a netip.Addr, open []netpolicy.Ports, ttl time.Duration) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	l := g.links[uint32(link)]
	if l == nil {
		return fmt.Errorf("pin %s to link %d: no sandbox has it", a, link)
	}
	begin, err := now()
	if err == nil {
		err = g.maps.Pins.Update(encodePinKey(uint32(link), a), encodePin(begin+ttl, open), ebpf.UpdateAny)
	}
	if err != nil {
		return fmt.Errorf("pin %s to link %d: %w", a, link, err)
	}
	l.pins[a], l.pinned = true, true
	return nil
}

// Unpin implements netpolicy.Gate.
func (g *Gate) Unpin(link int, a netip.Addr) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if l := g.links[uint32(link)]; l != nil {
		delete(l.pins, a)
	}
	return g.unpin(uint32(link), a)
}

func (g *Gate) unpin(link uint32, a netip.Addr) error {
	if err := g.maps.Pins.Delete(encodePinKey(link, a)); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("unpin %s from link %d: %w", a, link, err)
	}
	return nil
}

// Pinned implements netpolicy.Gate.
func (g *Gate) Pinned(link int) []netip.Addr {
	g.mu.Lock()
	defer g.mu.Unlock()
	l := g.links[uint32(link)]
	if l == nil {
		return nil
	}
	return slices.Collect(maps.Keys(l.pins))
}

// adoptPins reads what is pinned. Pins of no link are of one that is gone.
func (g *Gate) adoptPins() error {
	var key, value []byte
	type stale struct {
		link uint32
		addr netip.Addr
	}
	var gone []stale
	it := g.maps.Pins.Iterate()
	for it.Next(&key, &value) {
		link := binary.NativeEndian.Uint32(key)
		a, _ := netip.AddrFromSlice(key[4:8])
		if l := g.links[link]; l != nil {
			l.pins[a] = true
		} else {
			gone = append(gone, stale{link, a})
		}
	}
	if err := it.Err(); err != nil {
		return fmt.Errorf("read pins: %w", err)
	}
	for _, s := range gone {
		if err := g.unpin(s.link, s.addr); err != nil {
			return err
		}
	}
	return nil
}

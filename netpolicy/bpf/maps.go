package bpf

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/netpolicy"
)

// Sizes and offsets that the program and its maps agree on.
const (
	linkSize  = 16 // plan uint32, address uint32 as on the wire, generation uint64
	linkPlan  = 0
	linkAddr  = 4
	linkGen   = 8
	rangeSize = 8 // protocol, 0, first uint16, last uint16, 0, 0
	openSize  = netpolicy.MaxOpen * rangeSize
	planKey   = 12 // bits of the rest uint32, plan uint32, address
	pinKey    = 8  // link uint32, address
	pinSize   = 8 + openSize
	countSize = 32 // packets passed, their bytes, packets to the sandbox, packets refused
	eventSize = 24
)

// Capacities. A map takes memory only for what is in it.
const (
	maxLinks    = 1 << 16
	maxPrefixes = 1 << 20
	maxPins     = 1 << 20
	eventBuffer = 1 << 20 // bytes
)

// Maps are what the programs share with those who fill them.
type Maps struct {
	Links  *ebpf.Map // by index of a link: which plan it has
	Plans  *ebpf.Map // by plan and prefix: what is open
	Pins   *ebpf.Map // by link and address: what is open for a name, and until when
	Counts *ebpf.Map // by link
	Events *ebpf.Map // refusals
	Groups *ebpf.Map // by id of a control group: the link of the sandbox
}

func specs() map[string]*ebpf.MapSpec {
	return map[string]*ebpf.MapSpec{
		"dsec_links":  {Name: "dsec_links", Type: ebpf.Hash, KeySize: 4, ValueSize: linkSize, MaxEntries: maxLinks, Flags: unix.BPF_F_NO_PREALLOC},
		"dsec_plans":  {Name: "dsec_plans", Type: ebpf.LPMTrie, KeySize: planKey, ValueSize: openSize, MaxEntries: maxPrefixes, Flags: unix.BPF_F_NO_PREALLOC},
		"dsec_pins":   {Name: "dsec_pins", Type: ebpf.Hash, KeySize: pinKey, ValueSize: pinSize, MaxEntries: maxPins, Flags: unix.BPF_F_NO_PREALLOC},
		"dsec_counts": {Name: "dsec_counts", Type: ebpf.Hash, KeySize: 4, ValueSize: countSize, MaxEntries: maxLinks, Flags: unix.BPF_F_NO_PREALLOC},
		"dsec_groups": {Name: "dsec_groups", Type: ebpf.Hash, KeySize: 8, ValueSize: 4, MaxEntries: maxLinks, Flags: unix.BPF_F_NO_PREALLOC},
		"dsec_events": {Name: "dsec_events", Type: ebpf.RingBuf, MaxEntries: eventBuffer},
	}
}

// each names the fields.
func (m *Maps) each() map[string]**ebpf.Map {
	return map[string]**ebpf.Map{"dsec_links": &m.Links, "dsec_plans": &m.Plans, "dsec_pins": &m.Pins, "dsec_counts": &m.Counts, "dsec_events": &m.Events, "dsec_groups": &m.Groups}
}

// NewMaps makes empty ones.
func NewMaps() (*Maps, error) {
	m := &Maps{}
	for name, at := range m.each() {
		x, err := ebpf.NewMap(specs()[name])
		if err != nil {
			m.Close()
			return nil, fmt.Errorf("make map %s: %w", name, err)
		}
		*at = x
	}
	return m, nil
}

// Close lets go; programs keep what they use.
func (m *Maps) Close() {
	for _, at := range m.each() {
		if *at != nil {
			_ = (*at).Close()
		}
	}
}

// encodeOpen writes ranges as the program reads them: the first that is empty
// ends them.
func encodeOpen(b []byte, open []netpolicy.Ports) {
	le := binary.NativeEndian
	for i := range netpolicy.MaxOpen {
		at := b[i*rangeSize:][:rangeSize]
		first, last, protocol := uint16(1), uint16(0), uint8(0)
		if i < len(open) {
			protocol, first, last = open[i].Protocol, open[i].First, open[i].Last
		}
		at[0], at[1] = protocol, 0
		le.PutUint16(at[2:], first)
		le.PutUint16(at[4:], last)
		le.PutUint16(at[6:], 0)
	}
}

func encodeLink(plan uint32, a netip.Addr, generation uint64) []byte {
	b := make([]byte, linkSize)
	binary.NativeEndian.PutUint32(b[linkPlan:], plan)
	v4 := a.As4()
	copy(b[linkAddr:], v4[:])
	binary.NativeEndian.PutUint64(b[linkGen:], generation)
	return b
}

func encodePlanKey(plan uint32, n netip.Prefix) []byte {
	b := make([]byte, planKey)
	binary.NativeEndian.PutUint32(b, uint32(32+n.Bits()))
	binary.NativeEndian.PutUint32(b[4:], plan)
	v4 := n.Addr().As4()
	copy(b[8:], v4[:])
	return b
}

func encodePinKey(link uint32, a netip.Addr) []byte {
	b := make([]byte, pinKey)
	binary.NativeEndian.PutUint32(b, link)
	v4 := a.As4()
	copy(b[4:], v4[:])
	return b
}

// encodePin says until when, by the clock of the kernel that stands still in no
// sleep.
func encodePin(until time.Duration, open []netpolicy.Ports) []byte {
	b := make([]byte, pinSize)
	binary.NativeEndian.PutUint64(b, uint64(until))
	encodeOpen(b[8:], open)
	return b
}

// now is the kernel's clock by which pins end.
func now() (time.Duration, error) {
	var ts unix.Timespec
	err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts)
	return time.Duration(ts.Nano()), err
}

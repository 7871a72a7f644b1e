package bpf

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/netpolicy"
)

// loopback is the link that test runs are on.
const loopback = 1

var own = netip.MustParseAddr("10.213.0.20")

// gate has one link, without programs on it.
func gate(t *testing.T) *Gate {
	t.Helper()
	m, err := NewMaps()
	if err != nil {
		t.Fatal(err)
	}
	g, err := New(m)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := g.Close(); err != nil {
			t.Error(err)
		}
		m.Close()
	})
	if err := m.Counts.Update(uint32(loopback), make([]byte, countSize), ebpf.UpdateAny); err != nil {
		t.Fatal(err)
	}
	g.links[loopback] = &linked{addr: own, pins: map[netip.Addr]bool{}}
	return g
}

// packet is an Ethernet frame.
type packet struct {
	source, target netip.Addr
	protocol       uint8
	from, to       uint16
	fragment       uint16 // offset and flags
	options        int    // bytes
	ether          uint16 // 0: IPv4
	short          int    // bytes cut off
}

func (p packet) bytes() []byte {
	b := make([]byte, 14+20+p.options+60)
	binary.BigEndian.PutUint16(b[12:], max(p.ether, 0x0800))
	ip := b[14:]
	ip[0] = 0x40 | byte(5+p.options/4)
	binary.BigEndian.PutUint16(ip[2:], uint16(len(ip)))
	binary.BigEndian.PutUint16(ip[6:], p.fragment)
	ip[8], ip[9] = 64, p.protocol
	s, d := p.source.As4(), p.target.As4()
	copy(ip[12:], s[:])
	copy(ip[16:], d[:])
	binary.BigEndian.PutUint16(ip[20+p.options:], p.from)
	binary.BigEndian.PutUint16(ip[22+p.options:], p.to)
	return b[:len(b)-p.short]
}

// skb is the front of struct __sk_buff as a test run takes and gives it.
type skb struct {
	Len, PktType, Mark, Queue, Protocol, VLANPresent, VLANTCI, VLANProto, Priority, Ingress, Link, TCIndex uint32
	Rest                                                                                                   [36]uint32
}

func judge(t *testing.T, p *ebpf.Program, b []byte, mark uint32) (verdict, after uint32) {
	t.Helper()
	var out skb
	verdict, err := p.Run(&ebpf.RunOptions{Data: b, Context: skb{Mark: mark}, ContextOut: &out})
	if err != nil {
		t.Fatal(err)
	}
	return verdict, out.Mark
}

func apply(t *testing.T, g *Gate, rules ...dsec.NetworkRule) netpolicy.Plan {
	t.Helper()
	ground := netpolicy.Ground{Closed: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("240.0.0.0/4")}}
	p, err := netpolicy.Compile(dsec.NetworkAllow, rules, ground)
	if err == nil {
		_, err = g.Apply(loopback, p)
	}
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// TestTheProgramIsThePlan: what the kernel does with packets is what the plan says.
func TestTheProgramIsThePlan(t *testing.T) {
	g := gate(t)
	for seed := range uint64(40) {
		rng := rand.New(rand.NewPCG(seed, 3))
		some := func() netip.Addr {
			var b [4]byte
			binary.BigEndian.PutUint32(b[:], rng.Uint32()&0x0303_0303|uint32(rng.IntN(2))<<31)
			return netip.AddrFrom4(b)
		}
		var rules []dsec.NetworkRule
		for range 1 + rng.IntN(8) {
			r := dsec.NetworkRule{CIDR: netip.PrefixFrom(some(), rng.IntN(33)).Masked().String(), Protocol: []string{"", "udp", "any", "icmp"}[rng.IntN(4)]}
			if r.Protocol == "" || r.Protocol == "udp" {
				for i := range rng.IntN(4) {
					r.Ports = append(r.Ports, fmt.Sprintf("%d-%d", 1+10*i, 3+10*i+rng.IntN(5)))
				}
			}
			rules = append(rules, r)
		}
		plan := apply(t, g, rules...)
		for range 300 {
			p := packet{source: own, target: some(), protocol: []uint8{1, 6, 17, 47}[rng.IntN(4)], from: 7, to: uint16(rng.IntN(40)), options: 4 * rng.IntN(3)}
			port := p.to
			if p.protocol == 1 || p.protocol == 47 {
				port = 0
			}
			want := uint32(netpolicy.MarkRefused)
			if plan.Allows(p.target, p.protocol, port) {
				want = netpolicy.MarkOpen
			}
			if verdict, mark := judge(t, g.from, p.bytes(), 0); verdict != 0 || mark != want {
				t.Fatalf("seed %d: %+v: verdict %d, mark %x, want %x\nrules %+v", seed, p, verdict, mark, want, rules)
			}
			back := packet{source: p.target, target: own, protocol: p.protocol, from: p.to, to: p.from, options: p.options}
			if p.protocol == 1 {
				back.from = 0 // an echo reply
			}
			verdict, _ := judge(t, g.to, back.bytes(), 0)
			if opened := verdict == 0; opened != (want == netpolicy.MarkOpen) {
				t.Fatalf("seed %d: %+v: verdict %d\nrules %+v", seed, back, verdict, rules)
			}
		}
	}
}

// TestWhatIsNoPacketOfASandbox is dropped, whatever is open.
func TestWhatIsNoPacketOfASandbox(t *testing.T) {
	g := gate(t)
	apply(t, g, dsec.NetworkRule{CIDR: "0.0.0.0/0", Protocol: "any"}, dsec.NetworkRule{CIDR: "10.0.0.0/8", Protocol: "any"})
	open := packet{source: own, target: netip.MustParseAddr("1.2.3.4"), protocol: 6, to: 443}
	if verdict, mark := judge(t, g.from, open.bytes(), 0); verdict != 0 || mark != netpolicy.MarkOpen {
		t.Fatalf("a good packet: verdict %d, mark %x", verdict, mark)
	}
	for name, spoil := range map[string]func(*packet){
		"IPv6":            func(p *packet) { p.ether = 0x86dd },
		"a VLAN":          func(p *packet) { p.ether = 0x8100 },
		"PPPoE":           func(p *packet) { p.ether = 0x8864 },
		"a false source":  func(p *packet) { p.source = own.Next() },
		"cut in its port": func(p *packet) { p.short = 58 },
	} {
		p := open
		spoil(&p)
		if verdict, mark := judge(t, g.from, p.bytes(), 0); verdict != 2 {
			t.Errorf("%s: verdict %d, mark %x", name, verdict, mark)
		}
	}
	b := open.bytes()
	b[14] = 0x44 // a header of 16 bytes
	if verdict, _ := judge(t, g.from, b, 0); verdict != 2 {
		t.Errorf("a short header: verdict %d", verdict)
	}
	arp := open
	arp.ether = 0x0806
	if verdict, mark := judge(t, g.from, arp.bytes(), 0); verdict != 0 || mark != 0 {
		t.Errorf("ARP: verdict %d, mark %x", verdict, mark)
	}
	if err := g.maps.Links.Delete(uint32(loopback)); err != nil {
		t.Fatal(err)
	}
	if verdict, _ := judge(t, g.from, open.bytes(), 0); verdict != 2 {
		t.Errorf("a link of nobody: verdict %d", verdict)
	}
}

// TestMarksFromInsideCountForNothing: a mark that a packet brings is replaced.
func TestMarksFromInsideCountForNothing(t *testing.T) {
	g := gate(t)
	apply(t, g, dsec.NetworkRule{CIDR: "1.2.3.4"})
	p := packet{source: own, target: netip.MustParseAddr("1.2.3.5"), protocol: 6, to: 443}
	for _, mark := range []uint32{netpolicy.MarkOpen, netpolicy.MarkRouter} {
		if _, after := judge(t, g.from, p.bytes(), mark); after != netpolicy.MarkRefused {
			t.Errorf("mark %x became %x", mark, after)
		}
	}
	c, err := g.Counts(loopback)
	if err != nil || c.Refused != 2 || c.Out != 0 {
		t.Errorf("%+v, %v", c, err)
	}
}

// TestFragments: the first has the ports and is judged by them; later ones pass
// where anything of the protocol is open, and are nothing without the first.
func TestFragments(t *testing.T) {
	g := gate(t)
	apply(t, g, dsec.NetworkRule{CIDR: "1.2.3.4", Protocol: "udp", Ports: []string{"53"}})
	first := packet{source: own, target: netip.MustParseAddr("1.2.3.4"), protocol: 17, to: 53, fragment: 0x2000}
	later := packet{source: own, target: netip.MustParseAddr("1.2.3.4"), protocol: 17, to: 9, fragment: 0x2064}
	for name, c := range map[string]struct {
		p    packet
		want uint32
	}{
		"first": {first, netpolicy.MarkOpen}, "later": {later, netpolicy.MarkOpen},
		"first to a closed port": {packet{source: own, target: first.target, protocol: 17, to: 54, fragment: 0x2000}, netpolicy.MarkRefused},
		"later of TCP":           {packet{source: own, target: first.target, protocol: 6, fragment: 1}, netpolicy.MarkRefused},
		"later to another":       {packet{source: own, target: first.target.Next(), protocol: 17, fragment: 1}, netpolicy.MarkRefused},
	} {
		if _, mark := judge(t, g.from, c.p.bytes(), 0); mark != c.want {
			t.Errorf("%s: mark %x", name, mark)
		}
	}
}

// TestWhatRoutersSayPasses: errors of packets that were let out, and the refusals
// of the router itself; not an echo of somebody else.
func TestWhatRoutersSayPasses(t *testing.T) {
	g := gate(t)
	apply(t, g, dsec.NetworkRule{CIDR: "1.2.3.4"})
	far := netip.MustParseAddr("9.9.9.9")
	for kind, want := range map[uint16]uint32{3: 0, 11: 0, 12: 0, 0: 2, 8: 2, 5: 2} {
		p := packet{source: far, target: own, protocol: 1, from: kind << 8}
		if verdict, _ := judge(t, g.to, p.bytes(), 0); verdict != want {
			t.Errorf("ICMP type %d: verdict %d", kind, verdict)
		}
	}
	reset := packet{source: far, target: own, protocol: 6, from: 443}
	for mark, want := range map[uint32]uint32{0: 2, netpolicy.MarkOpen: 2, netpolicy.MarkRefused: 2, netpolicy.MarkRouter: 0} {
		if verdict, _ := judge(t, g.to, reset.bytes(), mark); verdict != want {
			t.Errorf("a reset with mark %x: verdict %d", mark, verdict)
		}
	}
}

// TestPins: what a name opens, it opens for its time and its ports only.
func TestPins(t *testing.T) {
	g := gate(t)
	apply(t, g, dsec.NetworkRule{CIDR: "1.2.3.4"})
	a := netip.MustParseAddr("5.6.7.8")
	p := packet{source: own, target: a, protocol: 6, to: 8443}
	other := packet{source: own, target: a, protocol: 6, to: 80}
	try := func(p packet) bool { _, mark := judge(t, g.from, p.bytes(), 0); return mark == netpolicy.MarkOpen }
	if try(p) {
		t.Error("open before it is pinned")
	}
	pin := func(ttl time.Duration) {
		if err := g.Pin(loopback, a, []netpolicy.Ports{{Protocol: 6, First: 8443, Last: 8443}}, ttl); err != nil {
			t.Fatal(err)
		}
	}
	pin(time.Hour)
	if !try(p) || try(other) {
		t.Errorf("pinned: %v, another port %v", try(p), try(other))
	}
	pin(time.Minute)
	before := until(t, g, a)
	if try(other); until(t, g, a) != before {
		t.Error("what is refused prolongs it")
	}
	if try(p); until(t, g, a) < before+3*time.Minute {
		t.Error("use does not prolong it")
	}
	pin(-time.Nanosecond)
	if try(p) {
		t.Error("open after its time")
	}
	pin(time.Hour)
	if err := g.Unpin(loopback, a); err != nil || try(p) {
		t.Errorf("unpinned: %v", err)
	}
	if err := g.Unpin(loopback, a); err != nil {
		t.Error(err)
	}
}

// TestNamesAreLookedAt: what a name alone opens there has another mark,
// by which the router gives it to who reads what is said, and its answers come
// from there; what a rule of addresses opens too goes by.
func TestNamesAreLookedAt(t *testing.T) {
	g := gate(t)
	a := netip.MustParseAddr("5.6.7.8")
	open := []netpolicy.Ports{{Protocol: 6, First: 80, Last: 500}, {Protocol: 17, First: 443, Last: 443}}
	marks := func(want uint32, p packet) {
		t.Helper()
		p.source, p.target = own, a
		if verdict, mark := judge(t, g.from, p.bytes(), 0); mark != want || verdict != 0 {
			t.Errorf("%+v: mark %x, verdict %d", p, mark, verdict)
		}
		answer := packet{source: a, target: own, protocol: p.protocol, from: p.to}
		for mark, passes := range map[uint32]bool{netpolicy.MarkRouter: true, 0: want == netpolicy.MarkOpen} {
			if verdict, _ := judge(t, g.to, answer.bytes(), mark); (verdict == 0) != passes {
				t.Errorf("the answer to %+v with mark %x: verdict %d", p, mark, verdict)
			}
		}
	}
	apply(t, g, dsec.NetworkRule{CIDR: "1.2.3.4"})
	if err := g.Pin(loopback, a, open, time.Hour); err != nil {
		t.Fatal(err)
	}
	marks(netpolicy.MarkName, packet{protocol: 6, to: 443})
	marks(netpolicy.MarkOpen, packet{protocol: 17, to: 443})
	marks(netpolicy.MarkOpen, packet{protocol: 6, to: 444})
	marks(netpolicy.MarkName, packet{protocol: 6, to: 80})
	marks(netpolicy.MarkOpen, packet{protocol: 6, to: 81})
	marks(netpolicy.MarkRefused, packet{protocol: 6, to: 79})
	apply(t, g, dsec.NetworkRule{CIDR: "5.6.7.0/24", Ports: []string{"80"}})
	marks(netpolicy.MarkName, packet{protocol: 6, to: 443})
	marks(netpolicy.MarkOpen, packet{protocol: 6, to: 80})
	apply(t, g, dsec.NetworkRule{CIDR: "5.6.7.0/24", Ports: []string{"443"}})
	marks(netpolicy.MarkOpen, packet{protocol: 6, to: 443})
}

func until(t *testing.T, g *Gate, a netip.Addr) time.Duration {
	t.Helper()
	var value []byte
	if err := g.maps.Pins.Lookup(encodePinKey(loopback, a), &value); err != nil {
		t.Fatal(err)
	}
	return time.Duration(binary.NativeEndian.Uint64(value))
}

// TestPlansAreShared: equal plans are there once, and go with their last link;
// another gate over the same maps takes over what is in force.
func TestPlansAreShared(t *testing.T) {
	g := gate(t)
	const second = 2
	g.links[second] = &linked{addr: own.Next(), pins: map[netip.Addr]bool{}}
	plan := apply(t, g, dsec.NetworkRule{CIDR: "1.2.3.4"})
	size := len(planOf(g, loopback).keys)
	if _, err := g.Apply(second, plan); err != nil || planOf(g, second) != planOf(g, loopback) || entries(t, g) != size {
		t.Fatalf("%d entries of %d, %v", entries(t, g), size, err)
	}
	for want := uint64(2); want < 5; want++ {
		if n, err := g.Apply(second, plan); err != nil || n != want {
			t.Fatalf("generation %d, %v", n, err)
		}
	}
	again, err := New(g.maps)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = again.Close() }()
	if l := again.links[second]; l == nil || l.generation != 4 || l.addr != own.Next() || l.plan != again.links[loopback].plan || l.plan.key != planOf(g, second).key {
		t.Errorf("taken over: %+v", l)
	}
	if n, err := again.Apply(loopback, netpolicy.Plan{}); err != nil || n != 2 || entries(t, again) != size {
		t.Errorf("generation %d, %d entries, %v", n, entries(t, again), err)
	}
	if err := again.Pin(second, own, nil, time.Hour); err != nil {
		t.Fatal(err)
	}
	if err := again.Sweep(map[int]bool{loopback: true, second + 1: true}); err != nil || entries(t, again) != 0 || len(again.links) != 1 {
		t.Errorf("after the last link: %d entries, %v", entries(t, again), err)
	}
	if err := again.maps.Pins.Lookup(encodePinKey(second, own), &[]byte{}); err == nil {
		t.Error("a pin stays")
	}
}

func planOf(g *Gate, link uint32) *plan { return g.links[link].plan }

func entries(t *testing.T, g *Gate) (n int) {
	t.Helper()
	var key, value []byte
	it := g.maps.Plans.Iterate()
	for it.Next(&key, &value) {
		n++
	}
	if err := it.Err(); err != nil {
		t.Fatal(err)
	}
	return n
}

// TestRefusalsAreTold with what was refused, and counted.
func TestRefusalsAreTold(t *testing.T) {
	g := gate(t)
	apply(t, g, dsec.NetworkRule{CIDR: "1.2.3.4"})
	told := make(chan netpolicy.Refusal, 4)
	stop, err := g.Refusals(func(r netpolicy.Refusal) { told <- r })
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	p := packet{source: own, target: netip.MustParseAddr("9.9.9.9"), protocol: 17, to: 53}
	judge(t, g.from, p.bytes(), 0)
	want := netpolicy.Refusal{Link: loopback, Address: p.target, Protocol: 17, Port: 53, Generation: 1}
	if r := <-told; r != want {
		t.Errorf("told %+v, want %+v", r, want)
	}
	if s := want.String(); s != "udp 9.9.9.9:53" {
		t.Errorf("it reads %q", s)
	}
	if n, err := g.Counts(loopback); err != nil || n.Refused != 1 {
		t.Errorf("%+v, %v", n, err)
	}
	if !bytes.Equal(encodePinKey(1, own)[4:], own.AsSlice()) {
		t.Error("addresses are not as on the wire")
	}
}

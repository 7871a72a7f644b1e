package veth

import (
	"encoding/binary"
	"net"
	"net/netip"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
)

// datagram is one of one byte, kind, as a packet socket sends it; tagged, it is
// of a VLAN.
type datagram struct {
	to, from net.HardwareAddr
	src, dst netip.Addr
	kind     byte
	tagged   bool
}

func (d datagram) frame() []byte {
	b := append(append([]byte{}, d.to...), d.from...)
	if d.tagged {
		b = append(b, 0x81, 0x00, 0x00, 0x01)
	}
	b = append(b, 0x08, 0x00)
	ip := []byte{0x45, 0, 0, 29, 0, 1, 0, 0, 64, unix.IPPROTO_UDP, 0, 0}
	ip = append(append(ip, d.src.AsSlice()...), d.dst.AsSlice()...)
	var sum uint32
	for i := 0; i < len(ip); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(ip[i:]))
	}
	binary.BigEndian.PutUint16(ip[10:], ^uint16(sum+sum>>16))
	udp := binary.BigEndian.AppendUint16(nil, 9)
	udp = binary.BigEndian.AppendUint16(udp, 7000)
	return append(append(b, ip...), append(udp, 0, 9, 0, 0, d.kind)...)
}

// inject sends frames out of a sandbox's link by a packet socket.
func inject(t *testing.T, ns *os.File, datagrams ...datagram) {
	t.Helper()
	err := inNamespace(ns, func() error {
		link, err := net.InterfaceByName(sandboxLink)
		if err != nil {
			return err
		}
		s, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer func() { _ = unix.Close(s) }()
		for _, d := range datagrams {
			if err := unix.Sendto(s, d.frame(), 0, &unix.SockaddrLinklayer{Ifindex: link.Index}); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TestFramesOfPacketSocketsAreJudged: a packet socket goes around what judges
// sockets, and around the addresses of its link; not around the other end.
func TestFramesOfPacketSocketsAreJudged(t *testing.T) {
	l := newLab(t)
	seen := arrivals(t, l.outside)
	n := testNetwork(t, l, Config{})
	otherNS, other := attach(t, n, "b", dsec.NetworkOpen)
	ns, own := attachPolicy(t, n, "a", allow(dsec.NetworkRule{CIDR: public, Protocol: "udp", Ports: []string{"7000"}},
		dsec.NetworkRule{CIDR: n.Subnet().String(), Protocol: "any"}))
	var neighbour net.PacketConn
	if err := inNamespace(otherNS, func() (err error) { neighbour, err = net.ListenPacket("udp4", ":7000"); return err }); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = neighbour.Close() }()
	if _, err := dial(ns, "tcp4", public+":81"); err == nil { // and have the router's address looked up
		t.Fatal("a closed port answers")
	}
	s := must(spaceIn(ns))(t)
	defer s.Close()
	link := must(s.LinkByName(sandboxLink))(t)
	var router net.HardwareAddr
	for _, n := range must(s.NeighList(link.Attrs().Index, unix.AF_INET))(t) {
		if len(n.HardwareAddr) == 6 {
			router = n.HardwareAddr
		}
	}
	if router == nil {
		t.Fatal("the router's address is not known")
	}
	to, mac := netip.MustParseAddr(public), link.Attrs().HardwareAddr
	everybody := net.HardwareAddr{255, 255, 255, 255, 255, 255}
	inject(t, ns, datagram{router, mac, other.Address, to, 's', false}, datagram{router, mac, netip.MustParseAddr("8.8.8.8"), to, 'x', false},
		datagram{router, mac, own.Address, to, 'v', true}, datagram{router, mac, own.Address, other.Address, 'n', false},
		datagram{everybody, mac, own.Address, other.Address, 'n', false}, datagram{router, mac, own.Address, to, 'o', false})
	eventually(t, "what is allowed arrives", func() bool { return seen.count('o') == 1 })
	for _, kind := range []byte("sxv") {
		if seen.count(kind) != 0 {
			t.Errorf("frame %q arrives", kind)
		}
	}
	// The neighbour reads in order: had a frame come, it would be before this.
	if err := inNamespace(otherNS, func() error {
		c, err := net.Dial("udp4", "127.0.0.1:7000")
		if err == nil {
			_, err = c.Write([]byte("l"))
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 1)
	if _, _, err := neighbour.ReadFrom(b); err != nil || b[0] != 'l' {
		t.Errorf("the neighbour reads %q %v", b, err)
	}
}

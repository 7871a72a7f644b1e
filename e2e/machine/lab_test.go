package machine

import (
	wire "encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/linux"
)

// lab is a world for one machine: the node's network namespace, and one with
// servers, which is all that the node reaches.
type lab struct {
	node, outside *os.File
}

// netnsOf makes a network namespace with a loopback.
func netnsOf(t *testing.T, name string, script ...string) *os.File {
	t.Helper()
	var ns *os.File
	err := linux.OnThread(func() (err error) {
		if err = unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return err
		}
		ns, err = os.Open("/proc/thread-self/ns/net")
		return err
	})
	if err != nil {
		t.Fatalf("make network namespace %s: %v", name, err)
	}
	t.Cleanup(func() { _ = ns.Close() })
	for _, line := range script {
		inNet(t, ns, line)
	}
	return ns
}

func path(ns *os.File) string { return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), ns.Fd()) }

// inNet runs a shell command in a network namespace.
func inNet(t *testing.T, ns *os.File, line string) {
	t.Helper()
	if out, err := exec.Command("nsenter", "--net="+path(ns), "sh", "-ec", line).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", line, err, out)
	}
}

// newLab joins the two by a link; servers is what the outside one has besides.
func newLab(t *testing.T, servers []netip.Addr) lab {
	t.Helper()
	l := lab{outside: netnsOf(t, "outside", "ip link set lo up")}
	l.node = netnsOf(t, "node", "ip link set lo up", "ip link add wan type veth peer name wan netns "+path(l.outside),
		"ip addr add 100.64.9.1/24 dev wan; ip link set wan up", "ip route add default via 100.64.9.2 dev wan || true")
	inNet(t, l.outside, "ip addr add 100.64.9.2/24 dev wan; ip link set wan up")
	inNet(t, l.node, "ip route replace default via 100.64.9.2 dev wan")
	for _, a := range servers {
		inNet(t, l.outside, "ip addr add "+a.String()+"/32 dev wan")
	}
	return l
}

// binary is a dsec whose network is the node's.
func (l lab) binary(t *testing.T) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "dsec")
	if err := os.WriteFile(file, fmt.Appendf(nil, "#!/bin/sh\nexec nsenter --net=%s %s \"$@\"\n", path(l.node), binary), 0o755); err != nil {
		t.Fatal(err)
	}
	return file
}

// serve takes what comes to a port, of TCP and UDP, and says nothing.
func (l lab) serve(t *testing.T, port int) {
	t.Helper()
	err := linux.OnThread(func() error {
		if err := linux.JoinNS(l.outside, unix.CLONE_NEWNET); err != nil {
			return err
		}
		streams, err := net.Listen("tcp4", fmt.Sprintf(":%d", port))
		if err != nil {
			return err
		}
		t.Cleanup(func() { _ = streams.Close() })
		datagrams, err := net.ListenPacket("udp4", fmt.Sprintf(":%d", port))
		if err != nil {
			return err
		}
		t.Cleanup(func() { _ = datagrams.Close() })
		go swallow(streams)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

func swallow(l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			defer c.Close()
			for b := make([]byte, 4096); ; {
				if _, err := c.Read(b); err != nil {
					return
				}
			}
		}()
	}
}

// target is where a packet went.
type target struct {
	addr  netip.Addr
	proto uint8
	port  uint16
}

// arrival is one packet.
type arrival struct {
	target
	at time.Time // by the kernel
}

// arrivals notes every packet that comes to the outside, until stop, which returns
// them.
func (l lab) arrivals(t *testing.T) (stop func() []arrival) {
	t.Helper()
	var fd int
	err := linux.OnThread(func() (err error) {
		if err = linux.JoinNS(l.outside, unix.CLONE_NEWNET); err != nil {
			return err
		}
		link, err := net.InterfaceByName("wan")
		if err != nil {
			return err
		}
		fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		for _, err := range []error{
			unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TIMESTAMPNS, 1),
			unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 64<<20),
			unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Usec: 200_000}),
		} {
			if err != nil {
				return err
			}
		}
		return unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: binary16(unix.ETH_P_IP), Ifindex: link.Index})
	})
	if err != nil {
		t.Fatal(err)
	}
	var all []arrival
	over, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		all = receive(fd, over)
	}()
	end := sync.OnceFunc(func() {
		close(over)
		<-done
		if s, err := unix.GetsockoptTpacketStats(fd, unix.SOL_PACKET, unix.PACKET_STATISTICS); err != nil || s.Drops > 0 {
			t.Errorf("%d arrivals were not seen, %v", s.Drops, err)
		}
		_ = unix.Close(fd)
	})
	t.Cleanup(end)
	return func() []arrival { end(); return all }
}

// binary16 is n as it is on the wire.
func binary16(n uint16) uint16 {
	var b [2]byte
	wire.BigEndian.PutUint16(b[:], n)
	return wire.NativeEndian.Uint16(b[:])
}

// receive reads packets that came, until over.
func receive(fd int, over <-chan struct{}) (all []arrival) {
	packet, control := make([]byte, 256), make([]byte, 128)
	for {
		n, c, _, from, err := unix.Recvmsg(fd, packet, control, 0)
		if err != nil {
			select {
			case <-over:
				return all
			default:
				continue // the time is over, for a look
			}
		}
		if ll, ok := from.(*unix.SockaddrLinklayer); !ok || ll.Pkttype == unix.PACKET_OUTGOING {
			continue
		}
		if a, ok := parse(packet[:n], control[:c]); ok {
			all = append(all, a)
		}
	}
}

// parse reads a packet of IPv4 with ports, and when it came.
func parse(p, control []byte) (a arrival, ok bool) {
	if len(p) < 20 || len(p) < int(p[0]&15)*4+4 {
		return a, false
	}
	messages, err := unix.ParseSocketControlMessage(control)
	if err != nil || len(messages) != 1 || messages[0].Header.Type != unix.SO_TIMESTAMPNS {
		return a, false
	}
	ts := (*syscall.Timespec)(unsafe.Pointer(&messages[0].Data[0]))
	a.at = time.Unix(ts.Sec, ts.Nsec)
	a.addr, a.proto = netip.AddrFrom4([4]byte(p[16:20])), p[9]
	a.port = wire.BigEndian.Uint16(p[int(p[0]&15)*4+2:])
	return a, a.proto == unix.IPPROTO_TCP || a.proto == unix.IPPROTO_UDP
}

package veth

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/netpolicy"
	"github.com/opendsec/dsec/netpolicy/bpf"
)

func allow(rules ...dsec.NetworkRule) dsec.NetworkPolicy {
	return dsec.NetworkPolicy{Mode: dsec.NetworkAllow, Allow: rules}
}

func attachPolicy(t testing.TB, n *Network, id dsec.SandboxID, p dsec.NetworkPolicy) (*os.File, netpolicy.Lease) {
	t.Helper()
	ns := testNamespace(t)
	return ns, attachAt(t, n, id, p, netpolicy.Place{NetNS: ns})
}

func change(t testing.TB, n *Network, id dsec.SandboxID, p dsec.NetworkPolicy, ns *os.File) uint64 {
	t.Helper()
	g, err := n.Change(t.Context(), id, p, ns)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

// TestAnAllowListOpensWhatItSays: addresses, ports and protocols; the rest is
// refused at once, and never another sandbox.
func TestAnAllowListOpensWhatItSays(t *testing.T) {
	l := newLab(t)
	serve(t, l.outside, "0.0.0.0:8080")
	echo(t, l.outside, "0.0.0.0:5353")
	n := testNetwork(t, l, Config{})
	_, other := attach(t, n, "b", dsec.NetworkOpen)
	ns, _ := attachPolicy(t, n, "a", allow(dsec.NetworkRule{CIDR: public, Ports: []string{"80"}}, dsec.NetworkRule{CIDR: "10.9.9.9"},
		dsec.NetworkRule{CIDR: "169.254.169.254"}, dsec.NetworkRule{CIDR: n.Subnet().String(), Protocol: "any"}))
	for _, to := range []string{public + ":80", "10.9.9.9:80"} {
		if said, err := dial(ns, "tcp4", to); said != nodeAddr {
			t.Errorf("%s: %q %v", to, said, err)
		}
	}
	for _, to := range []string{public + ":8080", "172.16.5.5:80", "169.254.169.254:80", nodeAddr + ":80", other.Address.String() + ":80", n.Gateway().String() + ":80"} {
		begun := time.Now()
		if said, err := dial(ns, "tcp4", to); err == nil {
			t.Errorf("%s answers %q", to, said)
		} else if took := time.Since(begun); took > 300*time.Millisecond && to != n.Gateway().String()+":80" {
			t.Errorf("%s: %v only after %v", to, err, took)
		}
	}
	if answers := ask(t, ns, 1); answers != 0 {
		t.Error("UDP is answered")
	}
	change(t, n, "a", allow(dsec.NetworkRule{CIDR: public, Protocol: "udp", Ports: []string{"5353"}}), ns)
	if answers := ask(t, ns, 1); answers != 1 {
		t.Error("UDP is not answered")
	}
	if said, err := dial(ns, "tcp4", public+":80"); err == nil {
		t.Errorf("TCP is answered: %q", said)
	}
}

// stream is a connection on which the outside sends without an end.
func stream(t *testing.T, ns *os.File, addr string) net.Conn {
	t.Helper()
	var c net.Conn
	if err := inNamespace(ns, func() (err error) { c, err = net.DialTimeout("tcp4", addr, time.Second); return err }); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// flood sends to whoever connects.
func flood(t *testing.T, ns *os.File, addr string) {
	t.Helper()
	accept(t, ns, addr, func(c net.Conn) {
		for _, err := c.Write(make([]byte, 4096)); err == nil; _, err = c.Write(make([]byte, 4096)) {
		}
	})
}

// TestF13_AChangeCutsWhatItForbids: who sends, who receives and who only waits is
// told within a second that the connection is dead; others live on.
func TestF13_AChangeCutsWhatItForbids(t *testing.T) {
	l := newLab(t)
	flood(t, l.outside, "0.0.0.0:9000")
	n := testNetwork(t, l, Config{})
	both := []dsec.NetworkRule{{CIDR: public, Ports: []string{"9000"}}, {CIDR: "10.9.9.9", Ports: []string{"9000"}}}
	ns, _ := attachPolicy(t, n, "a", allow(both...))
	dies, lives := stream(t, ns, public+":9000"), stream(t, ns, "10.9.9.9:9000")
	waits := stream(t, ns, public+":9000")
	for _, c := range []net.Conn{dies, lives} {
		if _, err := io.ReadFull(c, make([]byte, 1<<20)); err != nil {
			t.Fatal(err)
		}
	}
	if g := change(t, n, "a", allow(both[1]), ns); g != 2 {
		t.Errorf("generation %d", g)
	}
	for _, c := range []net.Conn{dies, waits} {
		_ = c.SetDeadline(time.Now().Add(time.Second))
		if _, err := io.Copy(io.Discard, c); !errors.Is(err, unix.ECONNABORTED) && !errors.Is(err, unix.ECONNRESET) {
			t.Errorf("a forbidden connection: %v", err)
		}
	}
	_ = lives.SetDeadline(time.Now().Add(5 * time.Second))
	if _, err := io.ReadFull(lives, make([]byte, 1<<20)); err != nil {
		t.Errorf("an open connection: %v", err)
	}
	if g := change(t, n, "a", dsec.NetworkPolicy{}, ns); g != 3 {
		t.Errorf("generation %d", g)
	}
	if _, err := io.Copy(io.Discard, lives); !errors.Is(err, unix.ECONNABORTED) && !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("with no network at all: %v", err)
	}
	change(t, n, "a", allow(both...), ns)
	if _, err := io.ReadFull(stream(t, ns, public+":9000"), make([]byte, 1<<20)); err != nil {
		t.Errorf("open again: %v", err)
	}
}

// TestF11_FlipsLeakNothing: however often policies change under traffic, nothing
// arrives that was sent after a change was acknowledged that forbids it.
func TestF11_FlipsLeakNothing(t *testing.T) {
	l := newLab(t)
	n := testNetwork(t, l, Config{})
	const sandboxes, flips = 4, 250
	a := arrivals(t, l.outside)
	var wg sync.WaitGroup
	for i := range sandboxes {
		id := dsec.SandboxID(fmt.Sprint("a", i))
		ns, _ := attachPolicy(t, n, id, allow())
		wg.Go(func() { flip(t, n, id, ns, flips) })
	}
	wg.Wait()
	eventually(t, "what was open has arrived", func() bool { return a.count(open1) > sandboxes*flips/2 })
	if leaked := a.count(closed1); leaked > 0 {
		t.Errorf("%d of %d packets arrived that were sent when it was closed", leaked, sandboxes*flips)
	}
}

// What a datagram of this test says: whether it may arrive.
const (
	open1   = 'o'
	closed1 = 'c'
)

// flip opens and closes a port of the outside, and sends to it. It goes on when all
// that it sent has been judged: what waits is judged by what is in force then.
func flip(t *testing.T, n *Network, id dsec.SandboxID, ns *os.File, times int) {
	var c net.PacketConn
	if err := inNamespace(ns, func() (err error) { c, err = net.ListenPacket("udp4", ":0"); return err }); err != nil {
		t.Error(err)
		return
	}
	defer func() { _ = c.Close() }()
	send := func(kind byte) {
		if _, err := c.WriteTo([]byte{kind}, net.UDPAddrFromAddrPort(netip.MustParseAddrPort(public+":7000"))); err != nil {
			t.Error(err)
		}
	}
	for i := range times {
		if _, err := n.Change(t.Context(), id, allow(dsec.NetworkRule{CIDR: public, Protocol: "udp"}), ns); err != nil {
			t.Error(err)
		}
		for range 3 {
			send(open1)
		}
		g, err := n.Change(t.Context(), id, allow(), ns)
		if err != nil || g != uint64(2*i+3) {
			t.Errorf("generation %d after %d flips, %v", g, i+1, err)
		}
		send(closed1)
		for end := time.Now().Add(5 * time.Second); judged(t, n, id) != int64(4*(i+1)); time.Sleep(100 * time.Microsecond) {
			if time.Now().After(end) {
				t.Errorf("%d packets were judged of %d", judged(t, n, id), 4*(i+1))
				return
			}
		}
	}
}

func judged(t *testing.T, n *Network, id dsec.SandboxID) int64 {
	t.Helper()
	c, err := n.c.Gate.(*bpf.Gate).Counts(n.end(id).index)
	if err != nil {
		t.Error(err)
	}
	return c.Out + c.Refused
}

// arrived counts datagrams by what they say.
type arrived struct {
	mu sync.Mutex
	n  map[byte]int
}

func (a *arrived) count(kind byte) int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.n[kind]
}

func arrivals(t *testing.T, ns *os.File) *arrived {
	t.Helper()
	a := &arrived{n: map[byte]int{}}
	var sink net.PacketConn
	if err := inNamespace(ns, func() (err error) { sink, err = net.ListenPacket("udp4", public+":7000"); return err }); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		b := make([]byte, 1)
		for {
			if _, _, err := sink.ReadFrom(b); err != nil {
				return
			}
			a.mu.Lock()
			a.n[b[0]]++
			a.mu.Unlock()
		}
	})
	t.Cleanup(func() { _ = sink.Close(); wg.Wait() })
	return a
}

// TestAPolicyStaysInForceWithoutAnybody: who closes the network, or is killed,
// changes nothing; who opens it again can.
func TestAPolicyStaysInForceWithoutAnybody(t *testing.T) {
	l := newLab(t)
	keeper := mapKeeper{}
	c := Config{Gate: testGate(t), Deny: labDeny(), Name: "stay" + dsec.Random(3), Node: l.node, Keeper: keeper, Subnet: netip.MustParsePrefix("10.79.0.0/20")}
	n := must(Open(t.Context(), c))(t)
	ns, _ := attachPolicy(t, n, "a", allow(dsec.NetworkRule{CIDR: "10.9.9.9", Ports: []string{"80"}}))
	if err := n.Close(); err != nil {
		t.Fatal(err)
	}
	check := func(open, closed string) {
		t.Helper()
		if said, err := dial(ns, "tcp4", open+":80"); said != nodeAddr {
			t.Errorf("%s: %q %v", open, said, err)
		}
		if said, err := dial(ns, "tcp4", closed+":80"); err == nil {
			t.Errorf("%s answers %q", closed, said)
		}
	}
	check("10.9.9.9", public)
	n = must(Open(t.Context(), c))(t)
	t.Cleanup(func() {
		if err := n.Remove(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
	})
	check("10.9.9.9", public)
	change(t, n, "a", allow(dsec.NetworkRule{CIDR: public, Ports: []string{"80"}}), ns)
	check(public, "10.9.9.9")
	if _, err := n.Change(t.Context(), "nobody", allow(), ns); dsec.ClassOf(err) != dsec.IllegalState {
		t.Errorf("a sandbox without a link: %v", err)
	}
}

// TestWhoIsGoneIsForgotten, also of a sandbox that was started again.
func TestWhoIsGoneIsForgotten(t *testing.T) {
	l := newLab(t)
	n := testNetwork(t, l, Config{})
	gone, _ := attachPolicy(t, n, "a", allow())
	old := n.end("a")
	attachPolicy(t, n, "a", allow())
	attachPolicy(t, n, "b", allow())
	if err := gone.Close(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the first link of it is gone", func() bool {
		links := must(n.links.LinkList())(t)
		if err := n.sweep(links); err != nil {
			t.Fatal(err)
		}
		return n.c.Gate.Generation(old.index) == 0
	})
	if e := n.end("a"); e == nil || e == old || n.at(e.index) != e || n.at(old.index) != nil || len(n.byLink) != 2 || len(n.byAddr) != 2 || n.c.Gate.Generation(e.index) == 0 {
		t.Errorf("%+v; %d links, %d addresses", e, len(n.byLink), len(n.byAddr))
	}
}

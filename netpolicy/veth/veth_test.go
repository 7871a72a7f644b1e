package veth

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/netpolicy"
	"github.com/opendsec/dsec/netpolicy/bpf"
)

// lab is a node and an outside, each a network namespace of the test's own.
type lab struct {
	node, outside *os.File
}

// Addresses of the outside: one that is public, and some that nobody may reach.
const (
	public   = "203.0.113.2"
	nodeAddr = "203.0.113.1"
	resolver = "10.53.53.53"
)

var forbidden = []string{"10.9.9.9", "172.16.5.5", "192.168.77.7", "169.254.169.254", "100.64.1.1", "240.0.0.1", "255.255.255.254"}

func testNamespace(t testing.TB) *os.File {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("network namespaces are made by root here; uid is", os.Getuid())
	}
	ns, err := newNamespace()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = ns.Close() })
	s := must(spaceIn(ns))(t)
	defer s.Close()
	lo := must(s.LinkByName("lo"))(t)
	if err := s.LinkSetUp(lo); err != nil {
		t.Fatal(err)
	}
	return ns
}

func must[T any](v T, err error) func(testing.TB) T {
	return func(t testing.TB) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

func newLab(t testing.TB) lab {
	t.Helper()
	l := lab{testNamespace(t), testNamespace(t)}
	// New namespaces take over what the machine has.
	if err := inNamespace(l.node, func() error { return sysctl("net/ipv4/ip_forward", "0") }); err != nil {
		t.Fatal(err)
	}
	node := must(rawSpaceIn(l.node))(t)
	defer node.Close()
	outside := must(spaceIn(l.outside))(t)
	defer outside.Close()
	for _, err := range []error{
		addPair(node, pair{name: "wan", peer: "wan", peerNS: l.outside}),
		setAddress(node, "wan", netip.MustParseAddr(nodeAddr), 24, ""),
		setAddress(outside, "wan", netip.MustParseAddr(public), 24, ""),
		addRoute(node, "wan", netip.Prefix{}, netip.MustParseAddr(public)),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, a := range append(forbidden, resolver) {
		if err := setAddress(outside, "wan", netip.MustParseAddr(a), 32, ""); err != nil {
			t.Fatal(err)
		}
	}
	serve(t, l.outside, "0.0.0.0:80")
	serve(t, l.outside, "0.0.0.0:53")
	serve(t, l.node, "0.0.0.0:80")
	// Both ends have the same number, and then the kernel takes up to a second to start a link.
	eventually(t, "the lab's own link works", func() bool { _, err := dial(l.node, "tcp4", public+":80"); return err == nil })
	return l
}

// serve answers every TCP connection with the client's address.
func serve(t testing.TB, ns *os.File, addr string) {
	t.Helper()
	accept(t, ns, addr, func(c net.Conn) {
		host, _, _ := net.SplitHostPort(c.RemoteAddr().String())
		_, _ = io.WriteString(c, host)
	})
}

// accept calls f with every TCP connection, which ends with it.
func accept(t testing.TB, ns *os.File, addr string, f func(net.Conn)) {
	t.Helper()
	var ln net.Listener
	err := inNamespace(ns, func() (err error) { ln, err = net.Listen("tcp4", addr); return err })
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				f(c)
				_ = c.Close()
			})
		}
	})
	t.Cleanup(func() { _ = ln.Close(); wg.Wait() })
}

// dial connects from a namespace and returns what the server says.
func dial(ns *os.File, network, addr string) (said string, err error) {
	err = inNamespace(ns, func() error {
		d := net.Dialer{Timeout: 400 * time.Millisecond}
		c, err := d.Dial(network, addr)
		if err != nil {
			return err
		}
		defer func() { _ = c.Close() }()
		_ = c.SetDeadline(time.Now().Add(2 * time.Second))
		b, err := io.ReadAll(c)
		said = string(b)
		return err
	})
	return said, err
}

func testNetwork(t testing.TB, l lab, c Config) *Network {
	t.Helper()
	c.Name, c.Node = "t"+dsec.Random(6), l.node
	if c.Deny == nil {
		c.Deny = labDeny()
	}
	if c.Gate == nil {
		c.Gate = testGate(t)
	}
	n, err := Open(t.Context(), c)
	if errors.Is(err, dsec.Unsupported.Err()) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Remove(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
		left(t, l.node)
	})
	return n
}

var open = dsec.NetworkPolicy{Mode: dsec.NetworkOpen}

func testGate(t testing.TB) netpolicy.Gate {
	t.Helper()
	m := must(bpf.NewMaps())(t)
	t.Cleanup(m.Close)
	g := must(bpf.New(m))(t)
	t.Cleanup(func() { _ = g.Close() })
	return g
}

// labDeny is the default, but for the network that is the public one here.
func labDeny() []netip.Prefix {
	return slices.DeleteFunc(DefaultDeny(), func(p netip.Prefix) bool { return p.Contains(netip.MustParseAddr(public)) })
}

// left checks that a node has nothing of ours.
func left(t testing.TB, node *os.File) {
	t.Helper()
	s := must(spaceIn(node))(t)
	defer s.Close()
	for _, l := range must(s.LinkList())(t) {
		if strings.HasPrefix(l.Attrs().Name, "dsec-") {
			t.Errorf("link %s is left", l.Attrs().Name)
		}
	}
	_ = inNamespace(node, func() error {
		if out, err := exec.Command("nft", "list", "tables").CombinedOutput(); err != nil || strings.Contains(string(out), "dsec") {
			t.Errorf("tables are left: %s %v", out, err)
		}
		if b, err := os.ReadFile("/proc/sys/net/ipv4/ip_forward"); err != nil || strings.TrimSpace(string(b)) != "0" {
			t.Errorf("forwarding is left on: %s %v", b, err)
		}
		return nil
	})
}

func attach(t testing.TB, n *Network, id string, mode dsec.NetworkMode) (*os.File, netpolicy.Lease) {
	t.Helper()
	return attachPolicy(t, n, dsec.SandboxID(id), dsec.NetworkPolicy{Mode: mode})
}

func TestF1_NoneReachesNothing(t *testing.T) {
	l := newLab(t)
	n := testNetwork(t, l, Config{})
	ns, lease := attach(t, n, "a", dsec.NetworkNone)
	if lease.Address.IsValid() || lease.DNS != nil || len(lease.ResolvConf()) != 0 {
		t.Errorf("lease %+v, want nothing", lease)
	}
	serve(t, ns, "127.0.0.1:80")
	if said, err := dial(ns, "tcp4", "127.0.0.1:80"); said != "127.0.0.1" {
		t.Errorf("loopback: %q %v", said, err)
	}
	for _, to := range []string{public, nodeAddr, n.Gateway().String(), "169.254.169.254", "8.8.8.8"} {
		for _, kind := range []string{"tcp4", "udp4", "ip4:icmp", "ip4:99"} {
			expectUnreachable(t, ns, kind, to)
		}
	}
	for _, to := range []string{"2001:db8::1", "fe80::1%lo", "ff02::1%lo"} {
		expectUnreachable(t, ns, "udp6", to)
		expectUnreachable(t, ns, "tcp6", to)
	}
	s := must(spaceIn(ns))(t)
	defer s.Close()
	if links := must(s.LinkList())(t); len(links) != 1 {
		t.Errorf("%d links, want lo only", len(links))
	}
}

// expectUnreachable sends and expects the kernel to say that there is no way.
func expectUnreachable(t *testing.T, ns *os.File, kind, to string) {
	t.Helper()
	err := inNamespace(ns, func() error {
		if strings.HasPrefix(kind, "tcp") || strings.HasPrefix(kind, "udp") {
			to = net.JoinHostPort(to, "80")
		}
		c, err := (&net.Dialer{Timeout: time.Second}).Dial(kind, to)
		if err != nil {
			return err
		}
		defer func() { _ = c.Close() }()
		_, err = c.Write([]byte("12345678"))
		return err
	})
	if !errors.Is(err, unix.ENETUNREACH) && !errors.Is(err, unix.EADDRNOTAVAIL) && !errors.Is(err, unix.EHOSTUNREACH) && !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("%s to %s: %v, want network unreachable", kind, to, err)
	}
}

func TestOpenReachesThePublicInternetBehindTheNode(t *testing.T) {
	l := newLab(t)
	n := testNetwork(t, l, Config{DNS: []netip.Addr{netip.MustParseAddr(resolver)}})
	ns, lease := attach(t, n, "a", dsec.NetworkOpen)
	if said, err := dial(ns, "tcp4", public+":80"); said != nodeAddr {
		t.Errorf("the outside saw %q (%v), want the node's address", said, err)
	}
	if said, err := dial(ns, "tcp4", resolver+":53"); said != nodeAddr {
		t.Errorf("name server: %q %v", said, err)
	}
	if said, err := dial(ns, "tcp4", resolver+":80"); err == nil {
		t.Errorf("another port of the name server answers %q", said)
	}
	if string(lease.ResolvConf()) != "nameserver "+resolver+"\nnameserver "+n.Gateway().String()+"\noptions timeout:2 attempts:2\n" {
		t.Errorf("resolv.conf is %q", lease.ResolvConf())
	}
	if h := string(lease.Hosts("box")); !strings.Contains(h, lease.Address.String()+"\tbox\n") {
		t.Errorf("hosts is %q", h)
	}
}

func TestF10_OpenNeverReachesTheNodeItsNeighboursOrDeniedRanges(t *testing.T) {
	l := newLab(t)
	n := testNetwork(t, l, Config{})
	a, _ := attach(t, n, "a", dsec.NetworkOpen)
	b, other := attach(t, n, "b", dsec.NetworkOpen)
	serve(t, b, "0.0.0.0:80")
	to := append([]string{nodeAddr, other.Address.String(), n.Gateway().String(), n.address(nodeOffset).String(), n.address(routerOffset).String()}, forbidden...)
	for _, addr := range to {
		start := time.Now()
		if said, err := dial(a, "tcp4", addr+":80"); err == nil {
			t.Errorf("%s answers %q", addr, said)
		} else if slices.Contains(forbidden, addr) && addr != "255.255.255.254" && time.Since(start) > 300*time.Millisecond {
			t.Errorf("%s: %v only after %v, want a quick refusal", addr, err, time.Since(start))
		}
	}
	if said, err := dial(a, "tcp4", public+":80"); said != nodeAddr {
		t.Errorf("the public address: %q %v", said, err)
	}
}

func TestAllowIsAnExceptionToDenyButNotToMetadata(t *testing.T) {
	l := newLab(t)
	all := netip.MustParsePrefix("0.0.0.0/0")
	n := testNetwork(t, l, Config{Deny: []netip.Prefix{all}, Allow: []netip.Prefix{netip.MustParsePrefix("10.9.0.0/16"), netip.MustParsePrefix("169.254.0.0/16")}})
	ns, _ := attach(t, n, "a", dsec.NetworkOpen)
	if said, err := dial(ns, "tcp4", "10.9.9.9:80"); said != nodeAddr {
		t.Errorf("the allowed one: %q %v", said, err)
	}
	for _, to := range []string{public, "169.254.169.254", "172.16.5.5"} {
		if said, err := dial(ns, "tcp4", to+":80"); err == nil {
			t.Errorf("%s answers %q", to, said)
		}
	}
}

func TestF8_IPv6IsClosed(t *testing.T) {
	l := newLab(t)
	n := testNetwork(t, l, Config{})
	ns, _ := attach(t, n, "a", dsec.NetworkOpen)
	for _, to := range []string{"fe80::1%eth0", "ff02::1%eth0", "2001:db8::1"} {
		expectUnreachable(t, ns, "udp6", to)
		expectUnreachable(t, ns, "ip6:ipv6-icmp", to)
	}
	// Also when root inside turns it on: nobody answers.
	ping, err := exec.LookPath("ping")
	if err != nil {
		t.Skipf("the second half needs ping: %v", err)
	}
	err = inNamespace(ns, func() error {
		if err := sysctl("net/ipv6/conf/eth0/disable_ipv6", "0"); err != nil {
			return err
		}
		if out, err := exec.Command(ping, "-6", "-c1", "-W1", "-I", "eth0", "ff02::1").CombinedOutput(); err == nil {
			return fmt.Errorf("somebody answers: %s", out)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

func TestSpoofedSourcesGetNowhere(t *testing.T) {
	l := newLab(t)
	n := testNetwork(t, l, Config{})
	a, _ := attach(t, n, "a", dsec.NetworkOpen)
	_, other := attach(t, n, "b", dsec.NetworkOpen)
	inside := must(spaceIn(a))(t)
	defer inside.Close()
	for _, from := range []netip.Addr{other.Address, netip.MustParseAddr("8.8.8.8"), n.address(routerOffset)} {
		if err := setAddress(inside, sandboxLink, from, 32, ""); err != nil {
			t.Fatal(err)
		}
		err := inNamespace(a, func() error {
			d := net.Dialer{Timeout: 300 * time.Millisecond, LocalAddr: &net.TCPAddr{IP: from.AsSlice()}}
			c, err := d.Dial("tcp4", public+":80")
			if err == nil {
				_ = c.Close()
			}
			return err
		})
		if err == nil {
			t.Errorf("a connection from %s was made", from)
		}
	}
}

func TestLinksEndWithTheirNamespaceAndAddressesAreReused(t *testing.T) {
	l := newLab(t)
	n := testNetwork(t, l, Config{Subnet: netip.MustParsePrefix("10.77.0.0/24")})
	for round := range 3 {
		var spaces []*os.File
		for i := range 100 { // three rounds need more than the 238 addresses there are
			ns := must(newNamespace())(t)
			if _, err := n.Attach(t.Context(), dsec.SandboxID(fmt.Sprint("s", round, "x", i)), open, netpolicy.Place{NetNS: ns}); err != nil {
				t.Fatal(err)
			}
			spaces = append(spaces, ns)
		}
		if live := must(n.Live(t.Context()))(t); len(live) != 100 {
			t.Errorf("round %d: %d live, want 100", round, len(live))
		}
		for _, ns := range spaces {
			_ = ns.Close()
		}
		eventually(t, "all links go", func() bool { live, err := n.Live(t.Context()); return err == nil && len(live) == 0 })
	}
	for _, l := range must(n.links.LinkList())(t) {
		if strings.HasPrefix(l.Attrs().Name, linkPrefix) {
			t.Errorf("link %s is left", l.Attrs().Name)
		}
	}
	routes := must(n.links.RouteList(nil, netlink.FAMILY_V4))(t)
	if len(routes) > 3 {
		t.Errorf("routes are left: %v", routes)
	}
}

func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("never happened:", what)
		}
	}
}

func TestFullSubnetIsTyped(t *testing.T) {
	l := newLab(t)
	n := testNetwork(t, l, Config{Subnet: netip.MustParsePrefix("10.77.0.0/24")})
	var err error
	for i := 0; err == nil && i < 300; i++ {
		_, err = n.Attach(t.Context(), dsec.SandboxID(fmt.Sprint(i)), open, netpolicy.Place{NetNS: testNamespace(t)})
	}
	if !errors.Is(err, dsec.ResourceExhausted.Err()) {
		t.Errorf("the last error is %v, want resource_exhausted", err)
	}
	ns, _ := attach(t, n, "none", dsec.NetworkNone)
	if _, err := n.Attach(t.Context(), "x", dsec.NetworkPolicy{Mode: "nosuch"}, netpolicy.Place{NetNS: ns}); !errors.Is(err, dsec.Invalid.Err()) {
		t.Errorf("unknown mode: %v, want unsupported", err)
	}
}

// mapKeeper keeps descriptors as hold does.
type mapKeeper map[string]*os.File

func (k mapKeeper) Get(_ context.Context, name string) (*os.File, error) {
	if f := k[name]; f != nil {
		return nodeNamespace(f)
	}
	return nil, dsec.E(dsec.NotFound, "get descriptor", name, nil)
}

func (k mapKeeper) Put(_ context.Context, name string, f *os.File) (err error) {
	k[name], err = nodeNamespace(f)
	return err
}

func (k mapKeeper) Drop(_ context.Context, name string) error {
	if f := k[name]; f != nil {
		_ = f.Close()
	}
	delete(k, name)
	return nil
}

func TestAnotherProcessAdoptsTheRouter(t *testing.T) {
	l := newLab(t)
	keeper := mapKeeper{}
	c := Config{Gate: testGate(t), Deny: labDeny(), Name: "adopt" + strings.ToLower(dsec.Random(3)), Node: l.node, Keeper: keeper, Subnet: netip.MustParsePrefix("10.78.0.0/20")}
	n, err := Open(t.Context(), c)
	if errors.Is(err, dsec.Unsupported.Err()) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	a, lease := attach(t, n, "a", dsec.NetworkOpen)
	if err := n.Close(); err != nil {
		t.Fatal(err)
	}
	if said, err := dial(a, "tcp4", public+":80"); said != nodeAddr {
		t.Errorf("without its agent: %q %v", said, err)
	}
	c.Subnet = netip.Prefix{}
	n = must(Open(t.Context(), c))(t)
	if n.Subnet() != netip.MustParsePrefix("10.78.0.0/20") {
		t.Errorf("subnet is %v", n.Subnet())
	}
	if live := must(n.Live(t.Context()))(t); !slices.Equal(live, []dsec.SandboxID{"a"}) {
		t.Errorf("live are %v, want a", live)
	}
	_, second := attach(t, n, "b", dsec.NetworkOpen)
	if second.Address == lease.Address {
		t.Errorf("%v is given twice", lease.Address)
	}
	if said, err := dial(a, "tcp4", public+":80"); said != nodeAddr {
		t.Errorf("after adoption: %q %v", said, err)
	}
	if err := n.Remove(t.Context()); err != nil {
		t.Fatal(err)
	}
	if len(keeper) != 0 {
		t.Errorf("kept: %v", keeper)
	}
	left(t, l.node)
}

func TestSubnetAvoidsTheNodesRoutes(t *testing.T) {
	l := newLab(t)
	node := must(spaceIn(l.node))(t)
	defer node.Close()
	first := Subnets()[0]
	if err := addRoute(node, "wan", first, netip.MustParseAddr(public)); err != nil {
		t.Fatal(err)
	}
	if got := must(chooseSubnet(node, netip.Prefix{}))(t); got != Subnets()[1] {
		t.Errorf("chose %v, want %v", got, Subnets()[1])
	}
	if _, err := chooseSubnet(node, netip.MustParsePrefix("10.0.0.0/30")); !errors.Is(err, dsec.Invalid.Err()) {
		t.Errorf("a /30: %v, want invalid", err)
	}
}

func TestTwoNetworksOfANodeHaveTwoSubnets(t *testing.T) {
	l := newLab(t)
	testNetwork(t, l, Config{Subnet: netip.MustParsePrefix("10.77.0.0/16")})
	_, err := Open(t.Context(), Config{Gate: testGate(t), Deny: labDeny(), Name: "second", Node: l.node, Subnet: netip.MustParsePrefix("10.77.0.0/20")})
	if !errors.Is(err, dsec.Conflict.Err()) || !strings.Contains(err.Error(), "dsec-t") {
		t.Errorf("a subnet that is in use: %v", err)
	}
}

func TestResolvConfOfANodeWithALocalStub(t *testing.T) {
	got := parseResolv("# x\nnameserver 127.0.0.53\nnameserver 2001:db8::1\nnameserver 10.1.1.1\noptions edns0\nnameserver 9.9.9.9\n")
	if !slices.Equal(got, []netip.Addr{netip.MustParseAddr("10.1.1.1"), netip.MustParseAddr("9.9.9.9")}) {
		t.Errorf("name servers %v", got)
	}
}

func BenchmarkAttach(b *testing.B) {
	l := newLab(b)
	n := testNetwork(b, l, Config{})
	var spent time.Duration
	for i := range b.N {
		ns := must(newNamespace())(b)
		start := time.Now()
		if _, err := n.Attach(b.Context(), dsec.SandboxID(fmt.Sprint(i)), open, netpolicy.Place{NetNS: ns}); err != nil {
			b.Fatal(err)
		}
		spent += time.Since(start)
		_ = ns.Close()
	}
	b.ReportMetric(float64(spent.Microseconds())/float64(b.N), "attach-µs/op")
}

// BenchmarkPrepared is BenchmarkAttach of links that were made ahead.
func BenchmarkPrepared(b *testing.B) {
	l := newLab(b)
	n := testNetwork(b, l, Config{})
	var ahead, spent time.Duration
	for i := range b.N {
		at := netpolicy.Place{NetNS: must(newNamespace())(b)}
		start := time.Now()
		if err := n.Prepare(b.Context(), at); err != nil {
			b.Fatal(err)
		}
		middle := time.Now()
		if _, err := n.Attach(b.Context(), dsec.SandboxID(fmt.Sprint(i)), open, at); err != nil {
			b.Fatal(err)
		}
		ahead, spent = ahead+middle.Sub(start), spent+time.Since(middle)
		_ = at.NetNS.Close()
	}
	b.ReportMetric(float64(ahead.Microseconds())/float64(b.N), "prepare-µs/op")
	b.ReportMetric(float64(spent.Microseconds())/float64(b.N), "attach-µs/op")
}

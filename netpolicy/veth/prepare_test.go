package veth

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/netpolicy"
	"github.com/opendsec/dsec/netpolicy/bpf"
)

// ahead has attachAt prepare each namespace before.
var ahead bool

// attachAt connects a namespace.
func attachAt(t testing.TB, n *Network, id dsec.SandboxID, p dsec.NetworkPolicy, at netpolicy.Place) netpolicy.Lease {
	t.Helper()
	if ahead && p.Mode != dsec.NetworkNone {
		prepare(t, n, at)
	}
	lease, err := n.Attach(t.Context(), id, p, at)
	if err != nil {
		t.Fatal(err)
	}
	return lease
}

func prepare(t testing.TB, n *Network, at netpolicy.Place) {
	t.Helper()
	if err := n.Prepare(t.Context(), at); err != nil {
		t.Fatal(err)
	}
	if number := must(numberOf(at.NetNS))(t); n.ready[number] == nil {
		t.Fatal("there is no prepared link")
	}
}

// TestPreparedLinksAreLikeOthers: what is promised of a link holds for one that was
// made ahead.
func TestPreparedLinksAreLikeOthers(t *testing.T) {
	ahead = true
	defer func() { ahead = false }()
	for name, f := range map[string]func(*testing.T){
		"open":       TestOpenReachesThePublicInternetBehindTheNode,
		"closed":     TestF10_OpenNeverReachesTheNodeItsNeighboursOrDeniedRanges,
		"IPv6":       TestF8_IPv6IsClosed,
		"spoofed":    TestSpoofedSourcesGetNowhere,
		"allow-list": TestAnAllowListOpensWhatItSays,
		"change":     TestF13_AChangeCutsWhatItForbids,
		"flips":      TestF11_FlipsLeakNothing,
		"frames":     TestFramesOfPacketSocketsAreJudged,
		"rate":       TestARateHoldsEachWay,
		"names":      TestNamesOpenWhatTheyLeadTo,
		"kept":       TestAPolicyStaysInForceWithoutAnybody,
		"forgotten":  TestWhoIsGoneIsForgotten,
	} {
		t.Run(name, f)
	}
}

// say sends a byte by UDP from a namespace, with a mark of the router's.
func say(t *testing.T, ns *os.File, what, to string) {
	t.Helper()
	err := inNamespace(ns, func() error {
		d := net.Dialer{Control: func(_, _ string, c syscall.RawConn) (err error) {
			cerr := c.Control(func(fd uintptr) {
				err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MARK, netpolicy.MarkRouter)
			})
			if cerr != nil {
				return cerr
			}
			return err
		}}
		c, err := d.Dial("udp4", to)
		if err != nil {
			return err
		}
		_, err = c.Write([]byte(what))
		_ = c.Close()
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TestNothingPassesAPreparedLink in either direction, until it is attached; then the
// same packets do.
func TestNothingPassesAPreparedLink(t *testing.T) {
	l := newLab(t)
	outside := arrivals(t, l.outside)
	n := testNetwork(t, l, Config{})
	at := netpolicy.Place{NetNS: testNamespace(t)}
	prepare(t, n, at)
	s := must(spaceIn(at.NetNS))(t)
	defer s.Close()
	eth := must(s.LinkByName(sandboxLink))(t)
	addrs := must(s.AddrList(eth, netlink.FAMILY_V4))(t)
	if len(addrs) != 1 || eth.Attrs().OperState != netlink.OperUp {
		t.Fatalf("%v, %s: a link that is up was to be found", addrs, eth.Attrs().OperState)
	}
	own, _ := netip.AddrFromSlice(addrs[0].IP.To4())
	var inside net.PacketConn
	if err := inNamespace(at.NetNS, func() (err error) { inside, err = net.ListenPacket("udp4", ":7000"); return err }); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = inside.Close() }()
	for range 5 {
		say(t, at.NetNS, "b", public+":7000")
		say(t, at.NetNS, "b", n.Gateway().String()+":53")
		say(t, n.router, "b", netip.AddrPortFrom(own, 7000).String())
	}
	if _, err := dial(at.NetNS, "tcp4", public+":80"); err == nil {
		t.Error("a connection goes out")
	}
	lease, err := n.Attach(t.Context(), "a", open, at)
	if err != nil || lease.Address != own {
		t.Fatalf("attached: %+v, %v, prepared as %s", lease, err, own)
	}
	if _, err := dial(at.NetNS, "tcp4", public+":80"); err != nil {
		t.Error(err)
	}
	say(t, at.NetNS, "o", public+":7000")
	say(t, n.router, "o", netip.AddrPortFrom(own, 7000).String())
	eventually(t, "what is open arrives", func() bool { return outside.count('o') == 1 })
	if c := outside.count('b'); c != 0 {
		t.Errorf("%d packets went out before there was a policy", c)
	}
	b := make([]byte, 1)
	if _, _, err := inside.ReadFrom(b); err != nil || b[0] != 'o' {
		t.Errorf("the first packet that came in is %q, %v", b, err)
	}
	if g := n.c.Gate.Generation(n.end("a").index); g != 1 {
		t.Errorf("generation %d, want 1 as of any that is attached", g)
	}
}

// linksOf are the names of the router's ends.
func linksOf(t *testing.T, n *Network) (names []string) {
	t.Helper()
	for _, l := range must(n.links.LinkList())(t) {
		if strings.HasPrefix(l.Attrs().Name, linkPrefix) {
			names = append(names, l.Attrs().Name)
		}
	}
	return names
}

// TestAPreparedLinkThatNobodyWantsLeavesNothing, neither with who has made it nor with
// one who comes after it was killed.
func TestAPreparedLinkThatNobodyWantsLeavesNothing(t *testing.T) {
	l := newLab(t)
	m := must(bpf.NewMaps())(t)
	defer m.Close()
	keeper := mapKeeper{}
	c := Config{Gate: must(bpf.New(m))(t), Deny: labDeny(), Name: "p" + dsec.Random(3), Node: l.node, Keeper: keeper}
	n := must(Open(t.Context(), c))(t)
	before := len(must(n.links.RouteList(nil, netlink.FAMILY_V4))(t))
	var spaces []*os.File
	for range 3 {
		ns := must(newNamespace())(t)
		prepare(t, n, netpolicy.Place{NetNS: ns})
		spaces = append(spaces, ns)
	}
	if err := n.Close(); err != nil { // as the kernel does for one that is killed
		t.Fatal(err)
	}
	n = must(Open(t.Context(), c))(t)
	defer func() {
		if err := n.Remove(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
	}()
	if names := linksOf(t, n); len(names) != 3 {
		t.Errorf("links %v, want 3", names)
	}
	if live := must(n.Live(t.Context()))(t); len(live) != 0 {
		t.Errorf("%v are live", live)
	}
	if _, err := n.Attach(t.Context(), "late", open, netpolicy.Place{NetNS: spaces[0]}); err == nil {
		t.Error("a link that another process has prepared was attached")
	}
	mine := must(newNamespace())(t)
	prepare(t, n, netpolicy.Place{NetNS: mine})
	for _, ns := range append(spaces, mine) {
		_ = ns.Close()
	}
	eventually(t, "all links go", func() bool { return len(linksOf(t, n)) == 0 })
	if after := must(n.links.RouteList(nil, netlink.FAMILY_V4))(t); len(after) != before {
		t.Errorf("routes are left: %v", after)
	}
	attachAt(t, n, "new", open, netpolicy.Place{NetNS: testNamespace(t)}) // what is new is not swept
	if err := n.sweep(must(n.links.LinkList())(t)); err != nil {
		t.Fatal(err)
	}
	if len(n.ready) != 0 {
		t.Errorf("%d prepared links are remembered", len(n.ready))
	}
	for what, at := range map[string]interface{ count() int }{"links": entries{m.Links}, "counts": entries{m.Counts}} {
		if c := at.count(); c != 1 {
			t.Errorf("%d %s in the gate, want that of the attached one", c, what)
		}
	}
}

type entries struct {
	m interface {
		NextKey(key, next any) error
	}
}

func (e entries) count() (n int) {
	var key, next uint32
	for err := e.m.NextKey(nil, &next); err == nil; err = e.m.NextKey(&key, &next) {
		key = next
		n++
	}
	return n
}

// TestALinkIsMadeUntilTheNetworkCloses: who makes them ahead need not know when.
func TestALinkIsMadeUntilTheNetworkCloses(t *testing.T) {
	l := newLab(t)
	n := must(Open(t.Context(), Config{Gate: testGate(t), Deny: labDeny(), Name: "c" + dsec.Random(3), Node: l.node}))(t)
	made, closed := make(chan struct{}), make(chan error)
	go func() {
		for i := 0; ; i++ {
			ns, err := newNamespace()
			if err == nil {
				err = n.Prepare(context.Background(), netpolicy.Place{NetNS: ns})
				_ = ns.Close()
			}
			if err != nil {
				closed <- err
				return
			}
			if i == 2 {
				close(made)
			}
		}
	}()
	<-made
	if err := n.Remove(t.Context()); err != nil {
		t.Error(err)
	}
	if err := <-closed; dsec.ClassOf(err) != dsec.Unavailable {
		t.Errorf("a link of a network that is closed: %v", err)
	}
}

func TestLinksArePreparedInParallel(t *testing.T) {
	n := testNetwork(t, newLab(t), Config{})
	const many = 16
	addrs := make([]netip.Addr, many)
	var wg sync.WaitGroup
	for i := range many {
		at := netpolicy.Place{NetNS: testNamespace(t)}
		wg.Go(func() {
			if err := n.Prepare(t.Context(), at); err != nil {
				t.Error(err)
				return
			}
			lease, err := n.Attach(t.Context(), dsec.SandboxID(fmt.Sprint("s", i)), open, at)
			if err != nil {
				t.Error(err)
				return
			}
			addrs[i] = lease.Address
			if said, err := dial(at.NetNS, "tcp4", public+":80"); err != nil {
				t.Errorf("%s: %q, %v", lease.Address, said, err)
			}
		})
	}
	wg.Wait()
	seen := map[netip.Addr]bool{}
	for _, a := range addrs {
		if seen[a] || !a.IsValid() {
			t.Errorf("%s twice", a)
		}
		seen[a] = true
	}
	if len(n.ready) != 0 || len(linksOf(t, n)) != many {
		t.Errorf("%d links wait, %v", len(n.ready), linksOf(t, n))
	}
}

// TestAPreparedLinkIsForWhatItWasMade: not for a sandbox without a network, and not for
// a namespace that has got the number of one that is gone.
func TestAPreparedLinkIsForWhatItWasMade(t *testing.T) {
	n := testNetwork(t, newLab(t), Config{})
	at := netpolicy.Place{NetNS: testNamespace(t)}
	prepare(t, n, at)
	if _, err := n.Attach(t.Context(), "none", dsec.NetworkPolicy{Mode: dsec.NetworkNone}, at); dsec.ClassOf(err) != dsec.IllegalState {
		t.Errorf("without a network: %v", err)
	}
	for _, prepared := range []bool{false, true} { // closed at first
		at := netpolicy.Place{NetNS: testNamespace(t), Link: true}
		if prepared {
			prepare(t, n, at)
		}
		id := dsec.SandboxID(fmt.Sprint("later-", prepared))
		lease, err := n.Attach(t.Context(), id, dsec.NetworkPolicy{Mode: dsec.NetworkNone}, at)
		if err != nil || !lease.Address.IsValid() {
			t.Fatalf("%+v %v", lease, err)
		}
		if said, err := dial(at.NetNS, "tcp4", public+":80"); err == nil {
			t.Errorf("closed, and %q is reached", said)
		}
		if _, err := n.Change(t.Context(), id, open, at.NetNS); err != nil {
			t.Fatal(err)
		}
		if said, err := dial(at.NetNS, "tcp4", public+":80"); err != nil {
			t.Errorf("opened: %q, %v", said, err)
		}
	}
	at = netpolicy.Place{NetNS: testNamespace(t), Rate: 1 << 20}
	prepare(t, n, at)
	if _, err := n.Attach(t.Context(), "fast", open, netpolicy.Place{NetNS: at.NetNS}); dsec.ClassOf(err) != dsec.Invalid {
		t.Errorf("with another rate: %v", err)
	}
	gone := must(newNamespace())(t)
	prepare(t, n, netpolicy.Place{NetNS: gone})
	stale := n.ready[must(numberOf(gone))(t)]
	_ = gone.Close()
	eventually(t, "its link is gone", func() bool { _, err := n.links.index(stale.name); return err != nil })
	ns := testNamespace(t)
	n.ready[must(numberOf(ns))(t)] = stale
	lease, err := n.Attach(t.Context(), "new", open, netpolicy.Place{NetNS: ns})
	if err != nil {
		t.Fatal(err)
	}
	if said, err := dial(ns, "tcp4", public+":80"); err != nil {
		t.Errorf("%s: %q, %v", lease.Address, said, err)
	}
}

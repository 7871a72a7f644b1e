package veth

import (
	"context"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/netpolicy/dns"
)

const nameServer = public + ":1053"

// answerNames answers questions in a namespace with one address each.
func answerNames(t *testing.T, ns *os.File, of map[string]string) {
	t.Helper()
	var c net.PacketConn
	if err := inNamespace(ns, func() (err error) { c, err = net.ListenPacket("udp4", nameServer); return err }); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		b := make([]byte, 4096)
		for {
			n, from, err := c.ReadFrom(b)
			if err != nil {
				return
			}
			var m dnsmessage.Message
			if m.Unpack(b[:n]) != nil || len(m.Questions) != 1 {
				continue
			}
			m.Response, m.Additionals = true, nil
			if addr, ok := of[m.Questions[0].Name.String()]; ok {
				m.Answers = []dnsmessage.Resource{{Header: dnsmessage.ResourceHeader{Name: m.Questions[0].Name, Class: dnsmessage.ClassINET, TTL: 0},
					Body: &dnsmessage.AResource{A: netip.MustParseAddr(addr).As4()}}}
			} else {
				m.RCode = dnsmessage.RCodeNameError
			}
			if r, err := m.Pack(); err == nil {
				_, _ = c.WriteTo(r, from)
			}
		}
	})
	t.Cleanup(func() { _ = c.Close(); wg.Wait() })
}

// resolve serves the names of a network until stop.
func resolve(t *testing.T, n *Network) (stop func()) {
	t.Helper()
	udp, tcp, err := n.ListenDNS()
	if err != nil {
		t.Fatal(err)
	}
	s := dns.Serve(dns.Config{Upstream: []netip.AddrPort{netip.MustParseAddrPort(nameServer)}, Node: n.InNode,
		Asker: func(a netip.Addr) (dns.Asker, bool) { return n.Asker(a) }, Log: slog.New(slog.NewTextHandler(io.Discard, nil))}, udp, tcp)
	return sync.OnceFunc(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
}

// lookUp asks as a program in a sandbox does.
func lookUp(t *testing.T, n *Network, ns *os.File, network, name string) ([]string, error) {
	t.Helper()
	r := &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, _, _ string) (c net.Conn, err error) {
		err = inNamespace(ns, func() (err error) {
			c, err = (&net.Dialer{Timeout: time.Second}).DialContext(ctx, network, n.Gateway().String()+":53")
			return err
		})
		return c, err
	}}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	return r.LookupHost(ctx, name)
}

// TestNamesOpenWhatTheyLeadTo: an address is open when it was handed out for a name
// that a rule opens, to who was given it, with the rule's ports; and closed when the
// rule goes, whoever was there before (cases F3, F5, F6, F13).
func TestNamesOpenWhatTheyLeadTo(t *testing.T) {
	l := newLab(t)
	serve(t, l.outside, "0.0.0.0:8080")
	serve(t, l.outside, "0.0.0.0:8081")
	flood(t, l.outside, "0.0.0.0:9443")
	answerNames(t, l.outside, map[string]string{"good.example.": public, "inside.example.": "10.9.9.9", "other.example.": public})
	keeper := mapKeeper{}
	c := Config{Gate: testGate(t), Deny: labDeny(), Name: "names" + dsec.Random(3), Node: l.node, Keeper: keeper, Subnet: netip.MustParsePrefix("10.81.0.0/20")}
	n := must(Open(t.Context(), c))(t)
	t.Cleanup(func() {
		if err := n.Remove(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
	})
	stop := resolve(t, n)
	defer func() { stop() }()
	policy := allow(dsec.NetworkRule{Domain: "good.example", Ports: []string{"8081", "9443"}}, dsec.NetworkRule{Domain: "inside.example"})
	ns, lease := attachPolicy(t, n, "a", policy)
	neighbour, _ := attachPolicy(t, n, "b", policy)
	if !slices.Equal(lease.DNS, []netip.Addr{n.Gateway()}) {
		t.Errorf("name servers %v", lease.DNS)
	}
	try := func(what string, ns *os.File, port string, open bool) {
		t.Helper()
		if said, err := dial(ns, "tcp4", public+":"+port); (err == nil) != open {
			t.Errorf("%s: %q, %v", what, said, err)
		}
	}
	try("before it was asked for", ns, "8081", false)
	for _, network := range []string{"udp", "tcp"} {
		if got, err := lookUp(t, n, ns, network, "good.example."); err != nil || !slices.Equal(got, []string{public}) {
			t.Fatalf("by %s: %v, %v", network, got, err)
		}
		for _, name := range []string{"other.example.", "inside.example.", "nobody.example."} {
			if got, err := lookUp(t, n, ns, network, name); err == nil || !strings.Contains(err.Error(), "no such host") {
				t.Errorf("%s by %s: %v, %v", name, network, got, err)
			}
		}
	}
	try("once it was", ns, "8081", true)
	try("another port", ns, "8080", false)
	try("somebody who did not ask", neighbour, "8081", false)
	live := stream(t, ns, public+":9443")
	if _, err := io.ReadFull(live, make([]byte, 1<<16)); err != nil {
		t.Fatal(err)
	}

	// Another process: what is open stays so, names are known when it is told.
	stop()
	if err := n.Close(); err != nil {
		t.Fatal(err)
	}
	try("without anybody", ns, "8081", true)
	n = must(Open(t.Context(), c))(t)
	stop = resolve(t, n)
	if got, err := lookUp(t, n, ns, "udp", "good.example."); err == nil {
		t.Errorf("before it is told the policy: %v", got)
	}
	if err := n.Restore(t.Context(), "a", policy); err != nil {
		t.Fatal(err)
	}
	if got, err := lookUp(t, n, ns, "udp", "good.example."); err != nil {
		t.Errorf("%v, %v", got, err)
	}
	// More rules leave it open.
	change(t, n, "a", allow(append(policy.Allow, dsec.NetworkRule{Domain: "x.example"})...), ns)
	if _, err := io.ReadFull(live, make([]byte, 1<<16)); err != nil {
		t.Errorf("a connection that is still allowed: %v", err)
	}
	change(t, n, "a", allow(dsec.NetworkRule{Domain: "x.example"}), ns)
	_ = live.SetDeadline(time.Now().Add(time.Second))
	if _, err := io.Copy(io.Discard, live); err == nil || os.IsTimeout(err) {
		t.Errorf("a connection of a name that is closed: %v", err)
	}
	try("when the rule is gone", ns, "8081", false)
	// From one mode to the other and back, by the name server it was given.
	change(t, n, "a", dsec.NetworkPolicy{Mode: dsec.NetworkOpen}, ns)
	if got, err := lookUp(t, n, ns, "udp", "other.example."); err != nil || !slices.Equal(got, []string{public}) {
		t.Errorf("when it is open: %v, %v", got, err)
	}
	try("when it is open", ns, "8080", true)
	change(t, n, "a", allow(dsec.NetworkRule{Domain: "x.example"}), ns)
	try("when it is not any more", ns, "8080", false)
	if got, err := lookUp(t, n, ns, "udp", "good.example."); err == nil {
		t.Errorf("when the rule is gone: %v", got)
	}
}

package dns

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/netpolicy"
)

// upstream is a name server of the test's own.
type upstream struct {
	mu    sync.Mutex
	asked []string
	reply func(q dnsmessage.Question, network string, m *dnsmessage.Message)
}

func (u *upstream) answer(b []byte, network string) []byte {
	var m dnsmessage.Message
	if m.Unpack(b) != nil || len(m.Questions) != 1 {
		return nil
	}
	u.mu.Lock()
	u.asked = append(u.asked, network+" "+m.Questions[0].Name.String())
	reply := u.reply
	u.mu.Unlock()
	out := dnsmessage.Message{Header: dnsmessage.Header{ID: m.ID, Response: true, RecursionAvailable: true}, Questions: m.Questions}
	reply(m.Questions[0], network, &out)
	r, err := out.Pack()
	if err != nil {
		return nil
	}
	return r
}

func (u *upstream) says(reply func(q dnsmessage.Question, network string, m *dnsmessage.Message)) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.reply = reply
}

func (u *upstream) questions() []string {
	u.mu.Lock()
	defer u.mu.Unlock()
	return slices.Clone(u.asked)
}

// start serves on the same port by UDP and TCP.
func (u *upstream) start(t *testing.T) netip.AddrPort {
	t.Helper()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	at := netip.MustParseAddrPort(l.Addr().String())
	c, err := net.ListenPacket("udp4", at.String())
	if err != nil {
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
			if a := u.answer(b[:n], "udp"); a != nil {
				_, _ = c.WriteTo(a, from)
			}
		}
	})
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			if b, err := readTCP(c); err == nil {
				if a := u.answer(b, "tcp"); a != nil {
					_ = writeTCP(c, a)
				}
			}
			_ = c.Close()
		}
	})
	t.Cleanup(func() { _, _ = c.Close(), l.Close(); wg.Wait() })
	return at
}

// asker has a plan and remembers what was pinned.
type asker struct {
	netpolicy.Plan
	mu     sync.Mutex
	pinned map[string][]netip.Addr
	ttl    time.Duration
	fail   error
	free   bool
}

func (a *asker) Free() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.free
}

func (a *asker) Pin(name string, addrs []netip.Addr, ttl time.Duration) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.pinned[name], a.ttl = addrs, ttl
	return a.fail
}

// lab is a server, who asks it and who it asks.
type lab struct {
	up  *upstream
	ask *asker
	at  netip.AddrPort

	refused atomic.Value // the last one that was told
}

func newLab(t *testing.T, domains ...string) *lab {
	t.Helper()
	var rules []dsec.NetworkRule
	for _, d := range domains {
		rules = append(rules, dsec.NetworkRule{Domain: d})
	}
	return newLabOf(t, rules)
}

// refused is what was told of a name that no rule opens.
type refused struct {
	name      string
	questions int64
}

// mirrorAt is where the mirror of a lab's ground is.
const mirrorAt = "10.213.0.1"

func newLabOf(t *testing.T, rules []dsec.NetworkRule) *lab {
	t.Helper()
	plan, err := netpolicy.Compile(dsec.NetworkAllow, rules, netpolicy.Ground{Mirror: netip.MustParseAddr(mirrorAt),
		Closed: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("169.254.0.0/16")}})
	if err != nil {
		t.Fatal(err)
	}
	l := &lab{up: &upstream{}, ask: &asker{Plan: plan, pinned: map[string][]netip.Addr{}}}
	server := l.up.start(t)
	ln, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l.at = netip.MustParseAddrPort(ln.Addr().String())
	pc, err := net.ListenPacket("udp4", l.at.String())
	if err != nil {
		t.Fatal(err)
	}
	s := Serve(Config{Upstream: []netip.AddrPort{server}, Log: slog.New(slog.NewTextHandler(io.Discard, nil)),
		Asker: func(netip.Addr) (Asker, bool) { return l.ask, true }, Node: func(f func() error) error { return f() },
		Refused: func(_ netip.Addr, name string, n int64) { l.refused.Store(refused{name, n}) }}, pc, ln)
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return l
}

// resolver is the one of the standard library, over one of the two.
func (l *lab) resolver(network string) *net.Resolver {
	return &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, network, l.at.String())
	}}
}

func a(name, addr string, ttl uint32) dnsmessage.Resource {
	return dnsmessage.Resource{Header: dnsmessage.ResourceHeader{Name: dnsmessage.MustNewName(name), Class: dnsmessage.ClassINET, TTL: ttl},
		Body: &dnsmessage.AResource{A: netip.MustParseAddr(addr).As4()}}
}

func cname(name, to string, ttl uint32) dnsmessage.Resource {
	return dnsmessage.Resource{Header: dnsmessage.ResourceHeader{Name: dnsmessage.MustNewName(name), Class: dnsmessage.ClassINET, TTL: ttl},
		Body: &dnsmessage.CNAMEResource{CNAME: dnsmessage.MustNewName(to)}}
}

func notFound(t *testing.T, what string, err error) {
	t.Helper()
	if e, ok := errors.AsType[*net.DNSError](err); !ok || !e.IsNotFound {
		t.Errorf("%s: %v", what, err)
	}
}

// TestF3_WhatIsNotAllowedIsNotAsked: it does not exist, at once, and no question
// leaves.
func TestF3_WhatIsNotAllowedIsNotAsked(t *testing.T) {
	l := newLab(t, "good.example", "*.wild.example")
	l.up.says(func(q dnsmessage.Question, _ string, m *dnsmessage.Message) {
		m.Answers = append(m.Answers, a(q.Name.String(), "192.0.2.7", 60))
	})
	for _, network := range []string{"udp", "tcp"} {
		begun := time.Now()
		for _, name := range []string{"bad.example.", "x.good.example.", "wild.example.", "evilgood.example.", "secret-data.attacker.example.", "good.example.attacker.example."} {
			_, err := l.resolver(network).LookupHost(t.Context(), name)
			notFound(t, name, err)
		}
		if took := time.Since(begun); took > 2*time.Second {
			t.Errorf("%s: refusals took %v", network, took)
		}
		for _, name := range []string{"good.example.", "GOOD.Example.", "a.b.wild.example."} {
			if got, err := l.resolver(network).LookupHost(t.Context(), name); err != nil || !slices.Equal(got, []string{"192.0.2.7"}) {
				t.Errorf("%s by %s: %v, %v", name, network, got, err)
			}
		}
	}
	if told, _ := l.refused.Load().(refused); told != (refused{"good.example.attacker.example.", 24}) { // of 6 names, by two ways, each for A and AAAA
		t.Errorf("told of %+v", told)
	}
	for _, q := range l.up.questions() {
		if !strings.Contains(q, "good.example.") && !strings.Contains(q, ".wild.example.") || strings.Contains(q, "attacker") || strings.Contains(q, "x.good") {
			t.Errorf("asked upstream: %s", q)
		}
	}
}

// TestF6_AllowedNamesResolve: by chains of names in other zones, with a short life,
// and with more addresses than a datagram has room for.
func TestF6_AllowedNamesResolve(t *testing.T) {
	l := newLab(t, "chain.example", "many.example", "none.example")
	l.up.says(func(q dnsmessage.Question, network string, m *dnsmessage.Message) {
		switch q.Name.String() {
		case "chain.example.":
			m.Answers = append(m.Answers, cname("chain.example.", "edge.CDN.example.net.", 300), a("other.example.", "192.0.2.66", 1), cname("edge.cdn.example.net.", "pop.example.org.", 0), a("pop.example.org.", "192.0.2.8", 300))
		case "many.example.":
			if network == "udp" {
				m.Truncated = true
				return
			}
			for i := range 60 {
				m.Answers = append(m.Answers, a("many.example.", netip.AddrFrom4([4]byte{192, 0, 2, byte(i)}).String(), 60))
			}
		}
	})
	for _, network := range []string{"udp", "tcp"} {
		if got, err := l.resolver(network).LookupHost(t.Context(), "chain.example."); err != nil || !slices.Equal(got, []string{"192.0.2.8"}) {
			t.Errorf("a chain by %s: %v, %v", network, got, err)
		}
		l.ask.mu.Lock()
		if !slices.Equal(l.ask.pinned["chain.example"], []netip.Addr{netip.MustParseAddr("192.0.2.8")}) || l.ask.ttl != 0 {
			t.Errorf("pinned %v for %v", l.ask.pinned, l.ask.ttl)
		}
		l.ask.mu.Unlock()
		if got, err := l.resolver(network).LookupHost(t.Context(), "many.example."); err != nil || len(got) != 60 {
			t.Errorf("many by %s: %d, %v", network, len(got), err)
		}
		l.ask.mu.Lock()
		if len(l.ask.pinned["many.example"]) != 60 {
			t.Errorf("pinned %d of 60", len(l.ask.pinned["many.example"]))
		}
		l.ask.mu.Unlock()
	}
	_, err := l.resolver("udp").LookupHost(t.Context(), "none.example.")
	notFound(t, "a name without addresses", err)
}

// TestNamesThatLeadInside have no address, and nothing is pinned.
func TestNamesThatLeadInside(t *testing.T) {
	l := newLab(t, "rebind.example", "mixed.example")
	l.up.says(func(q dnsmessage.Question, _ string, m *dnsmessage.Message) {
		m.Answers = append(m.Answers, a(q.Name.String(), "169.254.169.254", 60), a(q.Name.String(), "10.1.2.3", 60))
		if q.Name.String() == "mixed.example." {
			m.Answers = append(m.Answers, a(q.Name.String(), "192.0.2.9", 60))
		}
	})
	_, err := l.resolver("udp").LookupHost(t.Context(), "rebind.example.")
	notFound(t, "rebind", err)
	if got, err := l.resolver("udp").LookupHost(t.Context(), "mixed.example."); err != nil || !slices.Equal(got, []string{"192.0.2.9"}) {
		t.Errorf("%v, %v", got, err)
	}
	l.ask.mu.Lock()
	defer l.ask.mu.Unlock()
	if len(l.ask.pinned) != 1 || len(l.ask.pinned["mixed.example"]) != 1 {
		t.Errorf("pinned %v", l.ask.pinned)
	}
}

// TestOtherRecordsAreEmpty: nothing but addresses is handed out, or asked for.
func TestOtherRecordsAreEmpty(t *testing.T) {
	l := newLab(t, "good.example")
	l.up.says(func(q dnsmessage.Question, _ string, m *dnsmessage.Message) {
		m.Answers = append(m.Answers, dnsmessage.Resource{Header: dnsmessage.ResourceHeader{Name: q.Name, Class: dnsmessage.ClassINET, TTL: 9}, Body: &dnsmessage.TXTResource{TXT: []string{"answer"}}})
	})
	if got, err := l.resolver("udp").LookupTXT(t.Context(), "good.example."); err == nil || len(got) > 0 {
		t.Errorf("TXT: %v, %v", got, err)
	}
	if got, err := l.resolver("udp").LookupIP(t.Context(), "ip6", "good.example."); err == nil {
		t.Errorf("AAAA: %v", got)
	}
	if q := l.up.questions(); len(q) > 0 {
		t.Errorf("asked upstream: %v", q)
	}
}

// TestNothingIsHandedOutThatIsNotPinned, and an upstream that fails is a failure, not
// a name that does not exist.
func TestNothingIsHandedOutThatIsNotPinned(t *testing.T) {
	l := newLab(t, "good.example", "broken.example")
	l.up.says(func(q dnsmessage.Question, _ string, m *dnsmessage.Message) {
		if q.Name.String() == "broken.example." {
			m.RCode = dnsmessage.RCodeServerFailure
			return
		}
		m.Answers = append(m.Answers, a(q.Name.String(), "192.0.2.7", 60))
	})
	l.ask.mu.Lock()
	l.ask.fail = errors.New("no room")
	l.ask.mu.Unlock()
	for _, name := range []string{"good.example", "broken.example"} {
		q, err := question(9, name)
		if err != nil {
			t.Fatal(err)
		}
		c, err := net.Dial("tcp4", l.at.String())
		if err != nil {
			t.Fatal(err)
		}
		err = writeTCP(c, q)
		var b []byte
		if err == nil {
			b, err = readTCP(c)
		}
		var m dnsmessage.Message
		if err = errors.Join(err, m.Unpack(b), c.Close()); err != nil || m.RCode != dnsmessage.RCodeServerFailure || len(m.Answers) > 0 {
			t.Errorf("%s: %+v, %v", name, m, err)
		}
	}
}

// TestForgedAnswersCountForNothing: of another question, or with records that are
// not on the way from the name.
func TestForgedAnswersCountForNothing(t *testing.T) {
	l := newLab(t, "good.example")
	l.up.says(func(q dnsmessage.Question, _ string, m *dnsmessage.Message) {
		m.Answers = append(m.Answers, a("evil.example.", "192.0.2.66", 60), cname("evil.example.", "good.example.", 60), a("good.example.", "192.0.2.7", 60))
	})
	if got, err := l.resolver("udp").LookupHost(t.Context(), "good.example."); err != nil || !slices.Equal(got, []string{"192.0.2.7"}) {
		t.Errorf("%v, %v", got, err)
	}
	l.up.says(func(q dnsmessage.Question, _ string, m *dnsmessage.Message) {
		m.ID++
		m.Answers = append(m.Answers, a("good.example.", "192.0.2.66", 60))
	})
	if got, err := l.resolver("tcp").LookupHost(t.Context(), "good.example."); err == nil {
		t.Errorf("another's answer was taken: %v", got)
	}
	l.up.says(func(q dnsmessage.Question, _ string, m *dnsmessage.Message) {
		for range 3 {
			m.Answers = append(m.Answers, cname("good.example.", "loop.example.", 60), cname("loop.example.", "good.example.", 60))
		}
	})
	if got, err := l.resolver("udp").LookupHost(t.Context(), "good.example."); err == nil {
		t.Errorf("a circle of names: %v", got)
	}
}

// TestWhoMayReachEverythingAsksEverything: questions are passed on as they are, and
// nothing is pinned.
func TestWhoMayReachEverythingAsksEverything(t *testing.T) {
	l := newLab(t)
	l.ask.mu.Lock()
	l.ask.free = true
	l.ask.mu.Unlock()
	l.up.says(func(q dnsmessage.Question, network string, m *dnsmessage.Message) {
		if q.Type == dnsmessage.TypeTXT {
			m.Answers = append(m.Answers, dnsmessage.Resource{Header: dnsmessage.ResourceHeader{Name: q.Name, Class: dnsmessage.ClassINET, TTL: 9}, Body: &dnsmessage.TXTResource{TXT: []string{network}}})
		}
	})
	for _, network := range []string{"udp", "tcp"} {
		if got, err := l.resolver(network).LookupTXT(t.Context(), "any.example."); err != nil || !slices.Equal(got, []string{network}) {
			t.Errorf("by %s: %v, %v", network, got, err)
		}
	}
	if len(l.ask.pinned) > 0 {
		t.Errorf("pinned %v", l.ask.pinned)
	}
}

func FuzzAnswer(f *testing.F) {
	q, err := question(7, "good.example")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(q)
	f.Add([]byte{})
	plan, err := netpolicy.Compile(dsec.NetworkAllow, []dsec.NetworkRule{{Domain: "good.example"}}, netpolicy.Ground{})
	if err != nil {
		f.Fatal(err)
	}
	ask := &asker{Plan: plan, pinned: map[string][]netip.Addr{}}
	s := &Server{c: Config{Asker: func(netip.Addr) (Asker, bool) { return ask, true }, Log: slog.New(slog.NewTextHandler(io.Discard, nil))}, ctx: context.Background()}
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, tcp := range []bool{true, false} {
			out := s.answer(netip.Addr{}, b, tcp)
			if out == nil {
				continue
			}
			var m dnsmessage.Message
			if err := m.Unpack(out); err != nil || !m.Response || len(m.Answers) > 0 || !tcp && len(out) > maxUDP {
				t.Fatalf("%v, %+v", err, m)
			}
		}
	})
}

func FuzzRead(f *testing.F) {
	m := dnsmessage.Message{Header: dnsmessage.Header{Response: true}, Answers: []dnsmessage.Resource{cname("a.b.", "c.d.", 1), a("c.d.", "1.2.3.4", 5)}}
	b, err := m.Pack()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Fuzz(func(t *testing.T, b []byte) {
		var m dnsmessage.Message
		if m.Unpack(b) != nil {
			return
		}
		got, err := read(m, "a.b")
		if err == nil && (len(got.addrs) > maxAddrs || got.ttl < 0 || got.ttl > maxTTL) {
			t.Fatalf("%+v", got)
		}
	})
}

// TestNamesOfTheMirrorAreAnsweredHere: nobody is asked, and nothing is pinned.
func TestNamesOfTheMirrorAreAnsweredHere(t *testing.T) {
	l := newLabOf(t, []dsec.NetworkRule{{Mirror: "pypi"}, {Mirror: "debian"}})
	for _, network := range []string{"udp", "tcp"} {
		r := &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, network, l.at.String())
		}}
		for name, want := range map[string]bool{"pypi.mirror.dsec.": true, "PyPI.Mirror.DSEC.": true, "deb.debian.org.": true, "npm.mirror.dsec.": false, "x.pypi.mirror.dsec.": false, "mirror.dsec.": false} {
			got, err := r.LookupHost(t.Context(), name)
			if (err == nil) != want || want && (len(got) != 1 || got[0] != mirrorAt) {
				t.Errorf("%s by %s: %v %v", name, network, got, err)
			}
		}
	}
	l.ask.mu.Lock()
	defer l.ask.mu.Unlock()
	if len(l.ask.pinned) != 0 {
		t.Errorf("pinned: %v", l.ask.pinned)
	}
}

package netpolicy

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/opendsec/dsec"
)

func prefixList(list ...string) (out []netip.Prefix) {
	for _, s := range list {
		out = append(out, netip.MustParsePrefix(s))
	}
	return out
}

// ground is like a node's.
func ground() Ground {
	return Ground{Closed: prefixList("10.0.0.0/8", "169.254.0.0/16", "224.0.0.0/4", "240.0.0.0/4"), Never: prefixList("127.0.0.0/8", "10.213.0.0/16")}
}

func compiled(t *testing.T, g Ground, rules ...dsec.NetworkRule) Plan {
	t.Helper()
	p, err := Compile(dsec.NetworkAllow, rules, g)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestWhatRulesOpen(t *testing.T) {
	p := compiled(t, ground(),
		dsec.NetworkRule{CIDR: "203.0.113.0/24", Ports: []string{"443", "8000-8999"}},
		dsec.NetworkRule{CIDR: "203.0.113.7"},
		dsec.NetworkRule{CIDR: "198.51.100.0/24", Protocol: "udp", Ports: []string{"53"}},
		dsec.NetworkRule{CIDR: "192.0.2.1", Protocol: "icmp"},
		dsec.NetworkRule{CIDR: "10.1.2.3", Ports: []string{"5432"}},
		dsec.NetworkRule{CIDR: "10.213.0.9"})
	for _, c := range []struct {
		addr     string
		protocol uint8
		port     uint16
		want     bool
	}{
		{"203.0.113.1", tcp, 443, true}, {"203.0.113.1", tcp, 444, false}, {"203.0.113.1", udp, 443, false}, {"203.0.113.1", tcp, 8999, true},
		{"203.0.113.7", tcp, 1, true}, {"203.0.113.7", udp, 443, false}, {"203.0.114.0", tcp, 443, false}, {"203.0.112.255", tcp, 443, false},
		{"198.51.100.9", udp, 53, true}, {"198.51.100.9", tcp, 53, false}, {"192.0.2.1", icmp, 0, true}, {"192.0.2.1", tcp, 80, false},
		{"10.1.2.3", tcp, 5432, true}, {"10.1.2.4", tcp, 5432, false}, {"10.213.0.9", tcp, 80, false}, {"127.0.0.1", tcp, 80, false},
		{"::ffff:203.0.113.1", tcp, 443, true}, {"2001:db8::1", tcp, 443, false},
	} {
		if got := p.Allows(netip.MustParseAddr(c.addr), c.protocol, c.port); got != c.want {
			t.Errorf("%s protocol %d port %d: %v", c.addr, c.protocol, c.port, got)
		}
	}
}

// TestAWideRuleOpensNothingClosed: what is closed is opened by name only, up to
// the last address there is (case F10).
func TestAWideRuleOpensNothingClosed(t *testing.T) {
	for _, wide := range []string{"0.0.0.0/0", "128.0.0.0/1", "0.0.0.0/1"} {
		p := compiled(t, ground(), dsec.NetworkRule{CIDR: wide, Protocol: "any"})
		for addr, want := range map[string]bool{"10.0.0.1": false, "169.254.169.254": false, "224.0.0.1": false, "239.255.255.255": false,
			"240.0.0.0": false, "255.255.255.255": false, "127.0.0.1": false, "10.213.1.1": false,
			"223.255.255.255": wide != "0.0.0.0/1", "1.1.1.1": wide != "128.0.0.0/1"} {
			if got := p.Allows(netip.MustParseAddr(addr), tcp, 80); got != want {
				t.Errorf("%s opens %s: %v", wide, addr, got)
			}
		}
	}
	p := compiled(t, ground(), dsec.NetworkRule{CIDR: "240.0.0.0/4"}, dsec.NetworkRule{CIDR: "169.254.169.254"})
	for addr, want := range map[string]bool{"255.255.255.255": true, "240.0.0.0": true, "239.255.255.255": false, "169.254.169.254": true, "169.254.169.253": false} {
		if got := p.Allows(netip.MustParseAddr(addr), tcp, 80); got != want {
			t.Errorf("named: %s: %v", addr, got)
		}
	}
}

// TestTheMirrorIsOpenedByModeAndByRule: its port at the gateway and its names, and
// nothing else; where there is none, nobody is told that there is.
func TestTheMirrorIsOpenedByModeAndByRule(t *testing.T) {
	g, at := ground(), netip.MustParseAddr("10.213.0.1")
	if _, err := Compile(dsec.NetworkMirror, nil, g); dsec.ClassOf(err) != dsec.Unsupported {
		t.Errorf("without a mirror: %v", err)
	}
	g.Mirror, g.Serves = at, []Prefix{DNS(at)}
	all, err := Compile(dsec.NetworkMirror, nil, g)
	if err != nil {
		t.Fatal(err)
	}
	some := compiled(t, g, dsec.NetworkRule{Mirror: "pypi"}, dsec.NetworkRule{Mirror: "pypi"}, dsec.NetworkRule{Domain: "deb.debian.org"}, dsec.NetworkRule{Mirror: "debian"})
	nothing := compiled(t, g, dsec.NetworkRule{Domain: "pypi.org"})
	open, err := Compile(dsec.NetworkOpen, nil, g)
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		p     Plan
		names string
	}{"mirror-only": {all, "pypi npm go debian"}, "rules": {some, "pypi debian"}, "allow-list": {nothing, ""}, "open": {open, ""}} {
		if got := c.p.Allows(at, tcp, 80); got != (c.names != "") || c.p.Allows(at, tcp, 81) || c.p.Allows(at, udp, 80) || c.p.Allows(at.Next(), tcp, 80) {
			t.Errorf("%s: port 80 is open: %v", name, got)
		}
		if !c.p.Allows(at, udp, 53) {
			t.Errorf("%s: no resolver", name)
		}
		for _, s := range dsec.Mirrors {
			a, ok := c.p.MirrorAt(MirrorHost(s))
			if want := slices.Contains(strings.Fields(c.names), s); ok != want || ok && a != at {
				t.Errorf("%s: %s leads to %v", name, s, a)
			}
		}
	}
	if all.Allows(netip.MustParseAddr("1.1.1.1"), tcp, 443) || len(all.Opens("pypi.org")) > 0 {
		t.Error("mirror-only opens what is outside")
	}
	for _, n := range []string{"mirror.dsec", "x.pypi.mirror.dsec", "evil.mirror.dsec", "pypi.mirror.dsec.example", ""} {
		if _, ok := all.MirrorAt(n); ok {
			t.Errorf("%q is the mirror's", n)
		}
	}
	if _, ok := all.MirrorAt("deb.debian.org"); !ok {
		t.Error("apt does not find the mirror")
	}
	if _, ok := some.MirrorAt("deb.debian.org"); ok {
		t.Error("a name that a rule opens leads to the mirror")
	}
}

func TestModes(t *testing.T) {
	g := ground()
	g.Allow = prefixList("10.9.0.0/16")
	server := netip.MustParseAddr("10.213.0.1")
	g.Serves = []Prefix{DNS(server)}
	open, err := Compile(dsec.NetworkOpen, nil, g)
	if err != nil {
		t.Fatal(err)
	}
	none, err := Compile(dsec.NetworkNone, nil, g)
	if err != nil {
		t.Fatal(err)
	}
	for addr, want := range map[string]bool{"1.2.3.4": true, "10.8.255.255": false, "10.9.0.1": true, "10.213.0.1": false, "169.254.169.254": false} {
		a := netip.MustParseAddr(addr)
		if got := open.Allows(a, udp, 4433); got != want {
			t.Errorf("open: %s: %v", addr, got)
		}
		if none.Allows(a, udp, 4433) {
			t.Errorf("none: %s is open", addr)
		}
	}
	list := compiled(t, g)
	for name, p := range map[string]Plan{"open": open, "none": none, "allow-list": list} {
		asks := p.Allows(server, udp, 53) && p.Allows(server, tcp, 53)
		if asks != (name != "none") || p.Allows(server, tcp, 80) || p.Allows(server.Next(), udp, 53) || p.MayLeadTo(server.Next()) {
			t.Errorf("%s: asks the resolver: %v", name, asks)
		}
	}
	if _, err := Compile("all", nil, g); dsec.ClassOf(err) != dsec.Invalid {
		t.Errorf("unknown mode: %v", err)
	}
}

// TestNames: exact names and wildcards, in any case, with or without the last
// dot, in any alphabet; a wildcard is not the name itself (case F21).
func TestNames(t *testing.T) {
	p := compiled(t, ground(), dsec.NetworkRule{Domain: "PyPI.org."}, dsec.NetworkRule{Domain: "*.pythonhosted.org", Ports: []string{"443"}},
		dsec.NetworkRule{Domain: "*.bücher.example"}, dsec.NetworkRule{Domain: "a.pythonhosted.org", Protocol: "udp", Ports: []string{"443"}},
		dsec.NetworkRule{Domain: "_acme.example.com"})
	for name, want := range map[string]int{"pypi.org": 2, "x.pypi.org": 0, "evilpypi.org": 0, "pythonhosted.org": 0, "files.pythonhosted.org": 1,
		"a.b.pythonhosted.org": 1, "a.pythonhosted.org": 2, "xpythonhosted.org": 0, "www.xn--bcher-kva.example": 2, "org": 0, "": 0, "_acme.example.com": 2} {
		if got := p.Opens(name); len(got) != want {
			t.Errorf("%q opens %v, want %d", name, got, want)
		}
	}
	for in, want := range map[string]string{"BÜCHER.example.": "xn--bcher-kva.example", "A.B": "a.b", "_x.Y": "_x.y"} {
		if got, err := CanonicalName(in); err != nil || got != want {
			t.Errorf("%q is %q, %v", in, got, err)
		}
	}
	for _, in := range []string{"", ".", "a..b", "a b", strings.Repeat("a", 64) + ".x", strings.Repeat("a.", 127) + "bcd", "a/b", "a\x00"} {
		if got, err := CanonicalName(in); dsec.ClassOf(err) != dsec.Invalid {
			t.Errorf("%q is %q, %v", in, got, err)
		}
	}
}

// TestNamesDoNotLeadInside: a name that resolves to what is closed opens nothing,
// unless a rule opens the address.
func TestNamesDoNotLeadInside(t *testing.T) {
	p := compiled(t, ground(), dsec.NetworkRule{Domain: "x.example"}, dsec.NetworkRule{CIDR: "10.1.2.3", Ports: []string{"443"}})
	for addr, want := range map[string]bool{"1.2.3.4": true, "10.1.2.3": true, "10.1.2.4": false, "127.0.0.1": false, "169.254.169.254": false,
		"10.213.0.5": false, "255.255.255.255": false, "::ffff:10.1.2.4": false, "::1": false, "fe80::1": false, "64:ff9b::a01:204": false, "2002:a01:204::": false} {
		if got := p.MayLeadTo(netip.MustParseAddr(addr)); got != want {
			t.Errorf("%s: %v", addr, got)
		}
	}
}

func TestRulesThatCannotBe(t *testing.T) {
	many := make([]string, 0, 17)
	for i := range 9 {
		many = append(many, fmt.Sprint(1000+2*i))
	}
	for name, rules := range map[string][]dsec.NetworkRule{
		"nothing":             {{}},
		"both":                {{Domain: "a.b", CIDR: "1.2.3.4"}},
		"host bits":           {{CIDR: "10.1.2.3/8"}},
		"mapped":              {{CIDR: "::ffff:1.2.3.0/120"}},
		"port 0":              {{CIDR: "1.2.3.4", Ports: []string{"0"}}},
		"port order":          {{CIDR: "1.2.3.4", Ports: []string{"2-1"}}},
		"port 65536":          {{CIDR: "1.2.3.4", Ports: []string{"65536"}}},
		"icmp with ports":     {{CIDR: "1.2.3.4", Protocol: "icmp", Ports: []string{"1"}}},
		"icmp of a name":      {{Domain: "a.b", Protocol: "icmp"}},
		"unknown protocol":    {{CIDR: "1.2.3.4", Protocol: "sctp"}},
		"an address as name":  {{Domain: "1.2.3.4"}},
		"a URL":               {{Domain: "https://a.b/"}},
		"star in the middle":  {{Domain: "a.*.b"}},
		"everything":          {{Domain: "*"}},
		"too many port parts": {{CIDR: "1.2.3.4", Ports: many}, {CIDR: "1.2.3.0/24", Protocol: "udp", Ports: many}},
		"too many of a name":  {{Domain: "*.b.c", Ports: many}, {Domain: "a.b.c", Protocol: "udp", Ports: many}},
	} {
		if _, err := Compile(dsec.NetworkAllow, rules, ground()); dsec.ClassOf(err) != dsec.Invalid {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := Compile(dsec.NetworkAllow, []dsec.NetworkRule{{CIDR: "2001:db8::/32"}}, ground()); dsec.ClassOf(err) != dsec.Unsupported {
		t.Errorf("IPv6: %v", err)
	}
}

// TestThePlanIsThePolicy compares the plan with what the rules say one by one, at
// and beside every border.
func TestThePlanIsThePolicy(t *testing.T) {
	for seed := range uint64(300) {
		rng := rand.New(rand.NewPCG(seed, 7))
		around := func() netip.Prefix {
			var b [4]byte
			binary.BigEndian.PutUint32(b[:], rng.Uint32()&0x0303_0303|uint32(rng.IntN(2))<<31)
			return netip.PrefixFrom(netip.AddrFrom4(b), rng.IntN(33)).Masked()
		}
		var g Ground
		for range rng.IntN(4) {
			g.Closed = append(g.Closed, around())
		}
		for range rng.IntN(2) {
			g.Never = append(g.Never, around())
		}
		var rules []dsec.NetworkRule
		for range 1 + rng.IntN(6) {
			r := dsec.NetworkRule{CIDR: around().String(), Protocol: []string{"", "udp", "any"}[rng.IntN(3)]}
			if r.Protocol != "any" && rng.IntN(2) == 0 {
				r.Ports = []string{fmt.Sprint(1 + rng.IntN(4)), "3-5"}
			}
			rules = append(rules, r)
		}
		p := compiled(t, g, rules...)
		if again := compiled(t, g, rules...); !reflect.DeepEqual(p, again) {
			t.Fatalf("seed %d: the same policy gives another plan", seed)
		}
		for _, a := range borders(g, rules) {
			for _, protocol := range []uint8{icmp, tcp, udp} {
				for port := range uint16(7) {
					if got, want := p.Allows(a, protocol, port), said(a, protocol, port, rules, g); got != want {
						t.Fatalf("seed %d: %s protocol %d port %d: %v, want %v\nrules %+v\nground %+v\nplan %+v", seed, a, protocol, port, got, want, rules, g, p)
					}
				}
			}
		}
	}
}

// said is what rules say, looked at one by one.
func said(a netip.Addr, protocol uint8, port uint16, rules []dsec.NetworkRule, g Ground) bool {
	contains := func(p netip.Prefix) bool { return p.Contains(a) }
	if slices.ContainsFunc(g.Never, contains) {
		return false
	}
	closed := -1
	for _, c := range g.Closed {
		if contains(c) {
			closed = max(closed, c.Bits())
		}
	}
	for _, r := range rules {
		if n, _ := r.Prefix(); contains(n) && n.Bits() >= closed && Opens(ruleOpens(r), protocol, port) {
			return true
		}
	}
	return false
}

// borders are the first and last addresses of all ranges, and those beside them.
func borders(g Ground, rules []dsec.NetworkRule) (out []netip.Addr) {
	all := slices.Concat(g.Closed, g.Never)
	for _, r := range rules {
		n, _ := r.Prefix()
		all = append(all, n)
	}
	for _, n := range all {
		first := n.Addr()
		b := first.As4()
		binary.BigEndian.PutUint32(b[:], binary.BigEndian.Uint32(b[:])|uint32(uint64(1)<<(32-n.Bits())-1))
		last := netip.AddrFrom4(b)
		for _, a := range []netip.Addr{first, last, first.Prev(), last.Next()} {
			if a.IsValid() {
				out = append(out, a)
			}
		}
	}
	return out
}

func FuzzCompile(f *testing.F) {
	f.Add("pypi.org", "10.0.0.0/8", "tcp", "443")
	f.Add("*.x", "", "", "1-2")
	f.Fuzz(func(t *testing.T, domain, cidr, protocol, ports string) {
		r := dsec.NetworkRule{Domain: domain, CIDR: cidr, Protocol: protocol}
		if ports != "" {
			r.Ports = strings.Split(ports, ",")
		}
		p, err := Compile(dsec.NetworkAllow, []dsec.NetworkRule{r}, ground())
		if err != nil {
			if c := dsec.ClassOf(err); c != dsec.Invalid && c != dsec.Unsupported {
				t.Fatal(err)
			}
			return
		}
		for _, n := range p.Names {
			name := n.Name
			if n.Below {
				name = "x." + name
			}
			if c, err := CanonicalName(name); err != nil || c != name || len(p.Opens(name)) == 0 {
				t.Fatalf("%q is canonical as %q, %v, and opens %v", name, c, err, p.Opens(name))
			}
		}
		for _, a := range []string{"127.0.0.1", "10.213.0.1"} {
			if p.Allows(netip.MustParseAddr(a), tcp, 443) || p.MayLeadTo(netip.MustParseAddr(a)) {
				t.Fatalf("%s is open", a)
			}
		}
	})
}

package netpolicy

import (
	"cmp"
	"math"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"golang.org/x/net/idna"

	"github.com/opendsec/dsec"
)

// Plan is a policy as it is put in force: docs/formats/netpolicy.md. It is a value
// that nobody changes; the same policy on the same ground gives an equal one.
type Plan struct {
	Prefixes []Prefix       `json:"prefixes"` // sorted; of those that have an address the longest decides
	Names    []Name         `json:"names,omitempty"`
	Closed   []netip.Prefix `json:"closed"`            // where no name may lead
	Mirrors  []string       `json:"mirrors,omitempty"` // services of the mirror that are open
	Mirror   netip.Addr     `json:"mirror,omitzero"`   // where it is; invalid without services
	Free     bool           `json:"free,omitempty"`    // every name may be asked for, as by the mode open
}

// Prefix says what is open of a range of addresses; nothing: it is closed.
type Prefix struct {
	Net  netip.Prefix `json:"net"`
	Open []Ports      `json:"open,omitempty"`
}

// Name says what is open of the addresses that are handed out for a name.
type Name struct {
	Name  string  `json:"name"`            // lower case, as it is asked for
	Below bool    `json:"below,omitempty"` // of every name below it, not of itself
	Open  []Ports `json:"open"`
}

// Ports is a range of ports of a protocol.
type Ports struct {
	Protocol uint8  `json:"protocol"` // as IP has it; 0: all, whatever ports they have
	First    uint16 `json:"first"`    // 0 of what has none
	Last     uint16 `json:"last"`
}

// Ground is what a policy stands on: what a node knows and no rule says.
type Ground struct {
	Closed []netip.Prefix // opened only by a rule that lies inside
	Never  []netip.Prefix // opened by nothing
	Allow  []netip.Prefix // exceptions to Closed of the mode open
	Mirror netip.Addr     // where the mirror of packages is; invalid: there is none
	Serves []Prefix       // what the node itself gives, whatever else is closed; nothing to the mode none
}

// MaxOpen is how many ranges of ports one address or name may have.
const MaxOpen = 16

// DNS is what a resolver serves.
func DNS(a netip.Addr) Prefix {
	return Prefix{netip.PrefixFrom(a, a.BitLen()), []Ports{{tcp, 53, 53}, {udp, 53, 53}}}
}

// Protocols as IP numbers them.
const (
	anyProtocol = 0
	icmp        = 1
	tcp         = 6
	udp         = 17
)

var everything = Ports{anyProtocol, 0, math.MaxUint16}

// Compile makes the plan of a policy. It is pure. Errors are Invalid, and
// Unsupported for what this version cannot open.
func Compile(mode dsec.NetworkMode, rules []dsec.NetworkRule, g Ground) (Plan, error) {
	const op = "compile network policy"
	var open []opening
	p := Plan{Closed: collapse(slices.Concat(g.Closed, g.Never))}
	switch mode {
	case "", dsec.NetworkNone:
	case dsec.NetworkOpen:
		p.Free = true
		open = append(open, opening{Prefix{netip.PrefixFrom(netip.IPv4Unspecified(), 0), []Ports{everything}}, nowhere})
		for _, a := range g.Allow {
			open = append(open, opening{Prefix{a, []Ports{everything}}, a.Bits()})
		}
	case dsec.NetworkMirror:
		p.Mirrors = slices.Clone(dsec.Mirrors)
	case dsec.NetworkAllow:
		for i, r := range rules {
			if err := p.rule(r, &open); err != nil {
				return Plan{}, dsec.E(dsec.ClassOf(err), op, "rule "+strconv.Itoa(i), err)
			}
		}
	default:
		return Plan{}, dsec.Errorf(dsec.Invalid, op, dsec.Quote(string(mode)), "unknown mode")
	}
	if mode == "" || mode == dsec.NetworkNone {
		g.Serves = nil
	}
	if len(p.Mirrors) > 0 {
		if !g.Mirror.IsValid() {
			return Plan{}, dsec.Errorf(dsec.Unsupported, op, "mirror", "this node has no mirror of packages")
		}
		p.Mirror = g.Mirror
		g.Serves = append(slices.Clone(g.Serves), mirror(g.Mirror))
	}
	var err error
	if p.Prefixes, err = prefixes(open, g); err == nil {
		p.Names, err = names(p.Names)
	}
	if err != nil {
		return Plan{}, dsec.E(dsec.Invalid, op, string(mode), err)
	}
	return p, nil
}

// opening is a range that is opened, also in what is closed if that is not longer
// than within.
type opening struct {
	Prefix
	within int
}

// nowhere is an opening that opens nothing closed.
const nowhere = -1

// rule adds what one says.
func (p *Plan) rule(r dsec.NetworkRule, open *[]opening) error {
	if err := r.Validate(); err != nil {
		return err
	}
	if r.Mirror != "" {
		if !slices.Contains(p.Mirrors, r.Mirror) {
			p.Mirrors = append(p.Mirrors, r.Mirror)
			slices.Sort(p.Mirrors)
		}
		return nil
	}
	ports := ruleOpens(r)
	if r.CIDR != "" {
		net, err := r.Prefix()
		if err != nil {
			return err
		}
		if !net.Addr().Is4() {
			return dsec.Errorf(dsec.Unsupported, "read network rule", "cidr", "%s: IPv6 is closed to sandboxes", net)
		}
		*open = append(*open, opening{Prefix{net, ports}, net.Bits()})
		return nil
	}
	base, below := strings.CutPrefix(r.Domain, "*.")
	name, err := CanonicalName(base)
	if err != nil {
		return err
	}
	p.Names = append(p.Names, Name{name, below, ports})
	return nil
}

// ruleOpens are the ports of a valid rule.
func ruleOpens(r dsec.NetworkRule) (out []Ports) {
	protocol := map[string]uint8{"": tcp, "tcp": tcp, "udp": udp, "icmp": icmp, "any": anyProtocol}[r.Protocol]
	for _, s := range r.Ports {
		first, last, _ := dsec.ParsePorts(s)
		out = append(out, Ports{protocol, first, last})
	}
	switch {
	case out != nil:
	case r.Domain != "":
		out = []Ports{{protocol, 80, 80}, {protocol, 443, 443}}
	default:
		out = []Ports{{protocol, 0, math.MaxUint16}}
	}
	return out
}

// CanonicalName is a name as it is asked for: lower case, of other alphabets in
// their encoding, without a dot at its end.
func CanonicalName(s string) (string, error) {
	name := strings.ToLower(strings.TrimSuffix(s, "."))
	if strings.ContainsFunc(name, func(c rune) bool { return c > unicode.MaxASCII }) {
		var err error
		if name, err = idna.Lookup.ToASCII(name); err != nil {
			return "", dsec.E(dsec.Invalid, "read name", dsec.Quote(s), err)
		}
	}
	if !isPlain(name) {
		return "", dsec.Errorf(dsec.Invalid, "read name", dsec.Quote(s), "not a name that can be asked for")
	}
	return name, nil
}

// isPlain allows underscores, with which names begin that no host has.
func isPlain(name string) bool {
	if name == "" || len(name) > 253 {
		return false
	}
	for label := range strings.SplitSeq(name, ".") {
		if label == "" || len(label) > 63 || strings.Trim(label, "abcdefghijklmnopqrstuvwxyz0123456789-_") != "" {
			return false
		}
	}
	return true
}

// prefixes works out what is open of each range that anything says something of,
// so that the longest that has an address says all.
func prefixes(open []opening, g Ground) ([]Prefix, error) {
	at := map[netip.Prefix]bool{}
	for _, list := range [][]netip.Prefix{g.Closed, g.Never} {
		for _, n := range list {
			at[n.Masked()] = true
		}
	}
	for _, o := range open {
		at[o.Net.Masked()] = true
	}
	for _, s := range g.Serves {
		at[s.Net.Masked()] = true
	}
	var out []Prefix
	for n := range at {
		if !n.Addr().Is4() {
			continue
		}
		ports, err := MergePorts(opensOf(n, open, g))
		if err != nil {
			return nil, dsec.E(dsec.Invalid, "add up rules", n.String(), err)
		}
		out = append(out, Prefix{n, ports})
	}
	slices.SortFunc(out, func(a, b Prefix) int {
		return cmp.Or(a.Net.Addr().Compare(b.Net.Addr()), cmp.Compare(a.Net.Bits(), b.Net.Bits()))
	})
	return needed(out), nil
}

// opensOf lists what is open of a range that lies in no two parts of anything.
func opensOf(n netip.Prefix, open []opening, g Ground) (out []Ports) {
	for _, s := range g.Serves {
		if has(s.Net, n) {
			out = append(out, s.Open...)
		}
	}
	if inner(n, g.Never) >= 0 {
		return out
	}
	closed := inner(n, g.Closed)
	for _, o := range open {
		if has(o.Net, n) && o.within >= closed {
			out = append(out, o.Open...)
		}
	}
	return out
}

// inner is how long the longest of the ranges is that has all of n; -1: none has.
func inner(n netip.Prefix, in []netip.Prefix) int {
	longest := -1
	for _, c := range in {
		if has(c, n) {
			longest = max(longest, c.Bits())
		}
	}
	return longest
}

// has says whether all of n is in p.
func has(p, n netip.Prefix) bool { return p.Bits() <= n.Bits() && p.Contains(n.Addr()) }

// needed leaves out what the range around says, too. The list is sorted.
func needed(all []Prefix) (out []Prefix) {
	for _, p := range all {
		var around []Ports
		for _, o := range slices.Backward(out) {
			if has(o.Net, p.Net) {
				around = o.Open
				break
			}
		}
		if !slices.Equal(around, p.Open) {
			out = append(out, p)
		}
	}
	return out
}

// collapse sorts ranges and leaves out those that are in others.
func collapse(all []netip.Prefix) (out []netip.Prefix) {
	all = slices.Clone(all)
	slices.SortFunc(all, func(a, b netip.Prefix) int {
		return cmp.Or(cmp.Compare(a.Bits(), b.Bits()), a.Addr().Compare(b.Addr()))
	})
	for _, p := range all {
		if p = p.Masked(); inner(p, out) < 0 {
			out = append(out, p)
		}
	}
	return out
}

// MergePorts adds ranges of ports up: sorted, none meets another of its protocol.
// Invalid if they are more than MaxOpen.
func MergePorts(all []Ports) ([]Ports, error) {
	if slices.Contains(all, everything) {
		return []Ports{everything}, nil
	}
	all = slices.Clone(all)
	slices.SortFunc(all, func(a, b Ports) int {
		return cmp.Or(cmp.Compare(a.Protocol, b.Protocol), cmp.Compare(a.First, b.First))
	})
	var out []Ports
	for _, p := range all {
		last := len(out) - 1
		if last >= 0 && out[last].Protocol == p.Protocol && int(p.First) <= int(out[last].Last)+1 {
			out[last].Last = max(out[last].Last, p.Last)
			continue
		}
		out = append(out, p)
	}
	if len(out) > MaxOpen {
		return nil, dsec.Errorf(dsec.Invalid, "merge ports", "", "%d ranges, at most %d", len(out), MaxOpen)
	}
	return out, nil
}

// names adds up what rules say of the same.
func names(all []Name) (out []Name, err error) {
	slices.SortFunc(all, func(a, b Name) int {
		return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(btoi(a.Below), btoi(b.Below)))
	})
	for _, n := range all {
		if last := len(out) - 1; last >= 0 && out[last].Name == n.Name && out[last].Below == n.Below {
			out[last].Open = slices.Concat(out[last].Open, n.Open)
			continue
		}
		out = append(out, n)
	}
	for i := range out {
		if out[i].Open, err = MergePorts(out[i].Open); err != nil {
			return nil, dsec.E(dsec.Invalid, "add up rules", out[i].Name, err)
		}
	}
	for _, n := range out { // with all that speak of it, or of what is just below it
		name := n.Name
		if n.Below {
			name = "x." + name
		}
		if _, err := MergePorts(opensName(out, name)); err != nil {
			return nil, dsec.E(dsec.Invalid, "add up rules", n.Name, err)
		}
	}
	return out, nil
}

func btoi(b bool) int {
	if b {
		return 1
	}
	return 0
}

func opensName(all []Name, name string) (open []Ports) {
	for _, n := range all {
		if !n.Below && n.Name == name || n.Below && strings.HasSuffix(name, "."+n.Name) {
			open = append(open, n.Open...)
		}
	}
	return open
}

// Allows says whether an address is open without any name; port is 0 for what has
// none.
func (p Plan) Allows(a netip.Addr, protocol uint8, port uint16) bool {
	return Opens(p.at(a.Unmap()), protocol, port)
}

// at is what is open of an address.
func (p Plan) at(a netip.Addr) []Ports {
	for _, x := range slices.Backward(p.Prefixes) { // what is inside comes after what is around
		if x.Net.Contains(a) {
			return x.Open
		}
	}
	return nil
}

// Opens says whether one of the ranges has a port; it is 0 for what has none.
func Opens(open []Ports, protocol uint8, port uint16) bool {
	return slices.ContainsFunc(open, func(o Ports) bool {
		return (o.Protocol == anyProtocol || o.Protocol == protocol) && o.First <= port && port <= o.Last
	})
}

// Opens says what is open of the addresses of a canonical name; nothing: it may
// not even be asked for.
func (p Plan) Opens(name string) []Ports {
	open, _ := MergePorts(opensName(p.Names, name)) // Compile has seen to it that it fits
	return open
}

// MayLeadTo says whether a name may have an address. Names do not open what is
// closed, rules of addresses do.
func (p Plan) MayLeadTo(a netip.Addr) bool {
	a = a.Unmap()
	closed := slices.ContainsFunc(p.Closed, func(c netip.Prefix) bool { return c.Contains(a) })
	return a.Is4() && (!closed || len(p.at(a)) > 0)
}

package dsec

import (
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"
)

// NetworkMode is what a sandbox may reach.
type NetworkMode string

// The network modes of this version.
const (
	NetworkNone  NetworkMode = "none"       // loopback only; the default
	NetworkAllow NetworkMode = "allow-list" // what Spec.Allow names, and nothing else
	// NetworkMirror is the node's mirror of packages, and nothing else.
	NetworkMirror NetworkMode = "mirror-only"
	NetworkOpen   NetworkMode = "open" // NAT to the outside; never to other sandboxes, the node or metadata services
)

// Mirrors are the services of the mirror of packages: docs/formats/mirror.md.
var Mirrors = []string{"pypi", "npm", "go", "debian"}

// NetworkRule opens something to a sandbox whose mode is NetworkAllow. A rule has
// a Domain, a CIDR or a Mirror; docs/formats/netpolicy.md says what each means.
type NetworkRule struct {
	Domain   string   `json:"domain,omitempty"`   // "pypi.org", or "*.pypi.org": every name below, not itself
	CIDR     string   `json:"cidr,omitempty"`     // "203.0.113.0/24", or one address
	Mirror   string   `json:"mirror,omitempty"`   // one of Mirrors: "pypi"; it has no protocol and ports
	Protocol string   `json:"protocol,omitempty"` // "tcp" (default), "udp", "icmp" (of a CIDR) or "any" (of a CIDR)
	Ports    []string `json:"ports,omitempty"`    // "443" or "8000-8999"; default: 80 and 443 of a domain, all of a CIDR
}

// NetworkPolicy is what a sandbox may reach, from now on.
type NetworkPolicy struct {
	Mode  NetworkMode   `json:"mode"`
	Allow []NetworkRule `json:"allow,omitempty"` // of NetworkAllow

	// Of the mirror, see Spec; a change of the policy keeps them.
	Cutoff     time.Time `json:"cutoff,omitzero"`
	MirrorDeny []string  `json:"mirror_deny,omitempty"`
}

// MirrorServices are the services of the mirror that the policy opens.
func (p *NetworkPolicy) MirrorServices() []string {
	if p.Mode == NetworkMirror {
		return slices.Clone(Mirrors)
	}
	var all []string
	for _, r := range p.Allow {
		if r.Mirror != "" && !slices.Contains(all, r.Mirror) {
			all = append(all, r.Mirror)
		}
	}
	return all
}

// NetworkState is the policy in force.
type NetworkState struct {
	NetworkPolicy
	Generation uint64 `json:"generation"` // grows with each change; begins anew when the sandbox is started again
}

// Caps on what a policy may have.
const (
	MaxRules     = 256
	MaxRulePorts = 16
	MaxDenied    = 1024 // names that the mirror refuses
)

// Validate reports what can never work, as an Invalid error that names the field.
func (p *NetworkPolicy) Validate() error {
	const op = "validate network policy"
	switch p.Mode {
	case "", NetworkNone, NetworkAllow, NetworkMirror, NetworkOpen:
	default:
		return Errorf(Invalid, op, "network", "unknown mode %s", Quote(string(p.Mode)))
	}
	if len(p.Allow) > 0 && p.Mode != NetworkAllow {
		return Errorf(Invalid, op, "allow", "rules are for the network mode %s, this is %s", Quote(string(NetworkAllow)), Quote(string(p.Mode)))
	}
	if len(p.Allow) > MaxRules {
		return Errorf(Invalid, op, "allow", "%d rules, at most %d", len(p.Allow), MaxRules)
	}
	for i := range p.Allow {
		if err := p.Allow[i].Validate(); err != nil {
			return E(Invalid, op, "allow "+strconv.Itoa(i), err)
		}
	}
	if y := p.Cutoff.UTC().Year(); !p.Cutoff.IsZero() && (y < 1 || y > 9999) {
		return Errorf(Invalid, op, "cutoff", "in the year %d", y)
	}
	return validateDenied(p.MirrorDeny)
}

// validateDenied reads names like "pypi:requests".
func validateDenied(all []string) error {
	const op = "validate network policy"
	if len(all) > MaxDenied {
		return Errorf(Invalid, op, "mirror_deny", "%d names, at most %d", len(all), MaxDenied)
	}
	for _, d := range all {
		service, name, _ := strings.Cut(d, ":")
		if !slices.Contains(Mirrors, service) || name == "" || len(name) > MaxHostBytes || strings.ContainsFunc(name, func(c rune) bool { return c <= ' ' || c >= 0x7f }) {
			return Errorf(Invalid, op, "mirror_deny", "%s, want SERVICE:NAME of one of %s", Quote(d), strings.Join(Mirrors, ", "))
		}
	}
	return nil
}

// Validate reports what can never work, as an Invalid error.
func (r *NetworkRule) Validate() error {
	bad := func(field, format string, args ...any) error {
		return Errorf(Invalid, "read network rule", field, format, args...)
	}
	kinds := 0
	for _, s := range []string{r.Domain, r.CIDR, r.Mirror} {
		if s != "" {
			kinds++
		}
	}
	switch {
	case kinds != 1:
		return bad("domain", "want either a domain, a CIDR or a mirror")
	case r.Mirror != "" && !slices.Contains(Mirrors, r.Mirror):
		return bad("mirror", "%s, want one of %s", Quote(r.Mirror), strings.Join(Mirrors, ", "))
	case r.Mirror != "" && (r.Protocol != "" || len(r.Ports) > 0):
		return bad("mirror", "a mirror has no protocol and no ports")
	}
	if r.Domain != "" && !validDomain(r.Domain) {
		return bad("domain", "%s is not a name or *.name", Quote(r.Domain))
	}
	if r.CIDR != "" {
		if _, err := r.Prefix(); err != nil {
			return err
		}
	}
	switch {
	case r.Protocol == "", r.Protocol == "tcp", r.Protocol == "udp":
	case r.CIDR != "" && (r.Protocol == "icmp" || r.Protocol == "any"):
		if len(r.Ports) > 0 {
			return bad("ports", "%s has none", r.Protocol)
		}
	default:
		return bad("protocol", "%s, want tcp or udp, or of a CIDR icmp or any", Quote(r.Protocol))
	}
	if len(r.Ports) > MaxRulePorts {
		return bad("ports", "%d, at most %d", len(r.Ports), MaxRulePorts)
	}
	for _, p := range r.Ports {
		if _, _, err := ParsePorts(p); err != nil {
			return err
		}
	}
	return nil
}

// Prefix is the CIDR; bits below the mask must be 0, so that nobody means one
// host and opens many.
func (r *NetworkRule) Prefix() (netip.Prefix, error) {
	const op = "read network rule"
	if a, err := netip.ParseAddr(r.CIDR); err == nil && a.Zone() == "" {
		return netip.PrefixFrom(a.Unmap(), a.Unmap().BitLen()), nil
	}
	p, err := netip.ParsePrefix(r.CIDR)
	switch {
	case err != nil:
		return p, Errorf(Invalid, op, "cidr", "%s is no address and no prefix", Quote(r.CIDR))
	case p.Addr().Is4In6():
		return p, Errorf(Invalid, op, "cidr", "%s: write IPv4 as IPv4", Quote(r.CIDR))
	case p != p.Masked():
		return p, Errorf(Invalid, op, "cidr", "%s has bits below its mask: %s?", Quote(r.CIDR), p.Masked())
	}
	return p, nil
}

// ParsePorts reads "443" or "8000-8999"; ports are 1 to 65535.
func ParsePorts(s string) (first, last uint16, err error) {
	lo, hi, isRange := strings.Cut(s, "-")
	if !isRange {
		hi = lo
	}
	a, aerr := strconv.ParseUint(lo, 10, 16)
	b, berr := strconv.ParseUint(hi, 10, 16)
	if aerr != nil || berr != nil || a == 0 || a > b {
		return 0, 0, Errorf(Invalid, "read network rule", "ports", "%s, want a port or first-last", Quote(s))
	}
	return uint16(a), uint16(b), nil
}

// validDomain says whether a name can be one: what its letters are is for the
// resolver to know.
func validDomain(s string) bool {
	s = strings.TrimSuffix(strings.TrimPrefix(s, "*."), ".")
	if s == "" || len(s) > 253 {
		return false
	}
	for label := range strings.SplitSeq(s, ".") {
		if label == "" || len(label) > 63*4 { // of other alphabets a label is shorter when it is asked for
			return false
		}
	}
	if _, err := netip.ParseAddr(s); err == nil {
		return false
	}
	return !strings.ContainsFunc(s, func(c rune) bool {
		return c <= ' ' || c == 0x7f || strings.ContainsRune(`*/\:@?#%[]"'<>`, c) || c == 0xfffd
	})
}

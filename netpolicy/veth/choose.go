package veth

import (
	"net/netip"
	"os"
	"strings"

	"github.com/vishvananda/netlink"

	"github.com/opendsec/dsec"
)

// Subnets are tried in this order when none is configured.
func Subnets() []netip.Prefix {
	return []netip.Prefix{netip.MustParsePrefix("10.213.0.0/16"), netip.MustParsePrefix("10.117.0.0/16"),
		netip.MustParsePrefix("172.29.0.0/16"), netip.MustParsePrefix("100.121.0.0/16"), netip.MustParsePrefix("192.168.208.0/20")}
}

// chooseSubnet takes the asked one, or the first that no route of the node
// meets. The default route meets nothing.
func chooseSubnet(node *space, asked netip.Prefix) (netip.Prefix, error) {
	const op = "choose subnet"
	if asked.IsValid() {
		if !asked.Addr().Is4() || asked.Bits() < 8 || asked.Bits() > 24 {
			return asked, dsec.Errorf(dsec.Invalid, op, asked.String(), "want IPv4 with 8 to 24 bits")
		}
		return asked.Masked(), nil
	}
	routes, err := node.RouteList(nil, netlink.FAMILY_V4)
	if err != nil {
		return asked, dsec.E(dsec.Internal, op, "", err)
	}
	var used []netip.Prefix
	for _, r := range routes {
		if r.Dst == nil {
			continue
		}
		a, ok := netip.AddrFromSlice(r.Dst.IP.To4())
		if bits, _ := r.Dst.Mask.Size(); ok && bits > 0 {
			used = append(used, netip.PrefixFrom(a, bits))
		}
	}
	for _, s := range Subnets() {
		if !overlapsAny(s, used) {
			return s, nil
		}
	}
	return asked, dsec.Errorf(dsec.Conflict, op, "", "every subnet of %v is in use on this node: configure one", Subnets())
}

// alone checks that no other network of the node has the subnet: answers would
// go to the one that came first, and the sandboxes of the other wait for ever.
func (n *Network) alone(node *space) error {
	links, err := node.LinkList()
	if err != nil {
		return err
	}
	for _, l := range links {
		name := l.Attrs().Name
		if !strings.HasPrefix(name, nodePrefix) || name == n.c.nodeLink() {
			continue
		}
		addrs, err := node.AddrList(l, netlink.FAMILY_V4)
		if err != nil {
			return err
		}
		for _, a := range addrs {
			if ip, ok := netip.AddrFromSlice(a.IP.To4()); ok && n.subnet.Contains(ip) {
				return dsec.Errorf(dsec.Conflict, "choose subnet", n.subnet.String(), "%s of another dsec has it: configure another one", name)
			}
		}
	}
	return nil
}

func overlapsAny(p netip.Prefix, all []netip.Prefix) bool {
	for _, o := range all {
		if p.Overlaps(o) {
			return true
		}
	}
	return false
}

// nodeDNS reads the node's IPv4 name servers from the first file that has one
// that is not on the node itself: a local stub cannot be reached from outside.
func nodeDNS(files ...string) []netip.Addr {
	for _, f := range files {
		text, err := os.ReadFile(f)
		if err != nil {
			continue
		}
		if all := parseResolv(string(text)); len(all) > 0 {
			return all
		}
	}
	return nil
}

func parseResolv(text string) []netip.Addr {
	var all []netip.Addr
	for line := range strings.Lines(text) {
		f := strings.Fields(line)
		if len(f) < 2 || f[0] != "nameserver" {
			continue
		}
		if a, err := netip.ParseAddr(f[1]); err == nil && a.Is4() && !a.IsLoopback() && len(all) < 3 {
			all = append(all, a)
		}
	}
	return all
}

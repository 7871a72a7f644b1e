package veth

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"strings"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/netpolicy"
)

// DefaultDeny is every range that is not the public internet: private and
// shared addresses, loopback, link-local with the metadata services, networks
// for tests and documentation, which some machines are in, multicast and what is
// reserved up to the last address.
func DefaultDeny() []netip.Prefix {
	var all []netip.Prefix
	for _, s := range []string{"0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12",
		"192.0.0.0/24", "192.0.2.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4"} {
		all = append(all, netip.MustParsePrefix(s))
	}
	return all
}

// always is closed whatever the configuration and rules say.
func always() []netip.Prefix {
	return []netip.Prefix{netip.MustParsePrefix("169.254.0.0/16"), netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("224.0.0.0/4")}
}

// routerRules are complete: the table is replaced in one transaction. What may
// pass is for the gate to say, by its mark; what the router itself sends has one,
// too, by which the gate knows its refusals. The connections of a sandbox are
// counted where they are let through, so that it cannot fill the tables of router
// and node, which everybody shares. What a name alone opens goes to who looks at
// names, and if nobody does it is reset.
func (n *Network) routerRules() string {
	return fmt.Sprintf(`table inet dsec
delete table inet dsec
table inet dsec {
	set conns { type ipv4_addr; size %[4]d; flags dynamic; }
	counter over { }
	chain named {
		type nat hook prerouting priority dstnat;
		meta mark %[8]d tcp dport { %[10]d, %[11]d } dnat ip to %[7]s:%[9]d
	}
	chain input {
		type filter hook input priority filter; policy drop;
		iifname %[1]q ct state established,related accept
		meta mark %[5]d ip daddr %[7]s meta l4proto { tcp, udp } th dport 53 accept
		meta mark { %[5]d, %[8]d } ip daddr %[7]s tcp dport %[9]d ct status dnat jump admit
		meta mark %[5]d ip daddr %[7]s tcp dport 80 jump admit
	}
	chain admit {
		ct state established,related accept
		ct state new add @conns { ip saddr ct count over %[3]d } counter name over drop
		accept
	}
	chain output {
		type filter hook output priority mangle; policy accept;
		meta mark set %[6]d
	}
	chain forward {
		type filter hook forward priority filter; policy drop;
		meta nfproto != ipv4 drop
		iifname %[1]q ct state established,related accept
		iifname %[1]q drop
		oifname != %[1]q jump refuse
		meta mark != %[5]d jump refuse
		ct state established,related accept
		ct state invalid drop
		jump admit
	}
	chain refuse {
		meta l4proto tcp reject with tcp reset
		reject with icmp admin-prohibited
	}
	chain postrouting {
		type nat hook postrouting priority srcnat;
		oifname %[1]q snat ip to %[2]s
	}
}
`, uplink, n.address(routerOffset), n.c.Conns, max(1<<16, 1<<(32-n.subnet.Bits())), uint32(netpolicy.MarkOpen), uint32(netpolicy.MarkRouter), n.Gateway(),
		uint32(netpolicy.MarkName), namesPort, netpolicy.HTTPPort, netpolicy.TLSPort)
}

// Refused counts packets that would have begun one connection too many.
func (n *Network) Refused(ctx context.Context) (packets int64, err error) {
	const op = "count refused connections of"
	text, err := output(ctx, n.router, "nft", "-j", "list", "counter", "inet", "dsec", "over")
	if err != nil {
		return 0, dsec.E(dsec.Internal, op, n.c.Name, err)
	}
	var list struct {
		Items []struct {
			Counter *struct{ Packets int64 } `json:"counter"`
		} `json:"nftables"`
	}
	if err := json.Unmarshal(text, &list); err != nil {
		return 0, dsec.E(dsec.Corrupt, op, n.c.Name, err)
	}
	for _, i := range list.Items {
		if i.Counter != nil {
			packets += i.Counter.Packets
		}
	}
	return packets, nil
}

// Conns is how many connections a sandbox may have at once.
func (n *Network) Conns() int { return n.c.Conns }

// nodeRules keep the router's packets off the node itself and put the node's
// address on those that leave. The empty chain, if asked for, remembers that
// forwarding was off.
func (n *Network) nodeRules(forwardingWasOff bool) string {
	memory := ""
	if forwardingWasOff {
		memory = "chain " + offMark + " { }"
	}
	return fmt.Sprintf(`table inet %[1]s
delete table inet %[1]s
table inet %[1]s {
	%[4]s
	chain input {
		type filter hook input priority filter - 10; policy accept;
		iifname %[2]q drop
	}
	chain forward {
		type filter hook forward priority filter - 10; policy accept;
		iifname %[2]q meta nfproto != ipv4 drop
		iifname %[2]q ip saddr != %[3]s drop
		oifname %[2]q ct state established,related accept
		oifname %[2]q drop
	}
	chain postrouting {
		type nat hook postrouting priority srcnat;
		ip saddr %[3]s oifname != %[2]q masquerade
	}
}
`, n.table(), n.c.nodeLink(), n.address(routerOffset), memory)
}

func (n *Network) table() string { return tablePrefix + n.c.Name }

// applyRules puts both tables in force.
func (n *Network) applyRules(ctx context.Context) error {
	if err := nft(ctx, n.router, n.routerRules()); err != nil {
		return err
	}
	return n.forward(ctx)
}

// nft runs a script in a namespace, all or nothing.
func nft(ctx context.Context, ns *os.File, script string) error {
	path, err := exec.LookPath("nft")
	if err != nil {
		return dsec.Errorf(dsec.Unsupported, "apply network rules", "", "nft is not installed (package nftables)")
	}
	return inNamespace(ns, func() error {
		cmd := exec.CommandContext(ctx, path, "-f", "-")
		cmd.Stdin = strings.NewReader(script)
		out, err := cmd.CombinedOutput()
		if err != nil {
			return fmt.Errorf("nft: %w: %s", err, bytes.TrimSpace(out))
		}
		return nil
	})
}

package user

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
)

const allowHelp = `NAME, *.NAME, address or CIDR, then ports and a protocol: "pypi.org", "10.1.2.0/24,5432,8000-8999", "9.9.9.9,udp,53"; or "mirror:pypi", npm, go, debian (repeat)`

// Network is the verb that shows and changes what a sandbox may reach.
func Network() *cobra.Command {
	var allow []string
	c := &cobra.Command{
		Use:   "network SANDBOX [none|allow-list|mirror-only|open]",
		Short: "Show or change what a sandbox may reach",
		Long: `Shows what a sandbox may reach and, while it lives, what it has reached by name on ports 80 and 443
and what it was refused there: connections and bytes of each name and address.

With a mode it changes what a running sandbox may reach. When it returns, what the new policy does not open
is closed, and connections there are dead. With the mode allow-list only what --allow names is
open: a domain with ports 80 and 443 unless others are given, an address with all ports. With
mirror-only the node's mirror of packages is, as of the cut-off the sandbox was made with.

A sandbox that was made with the mode none has no network, and cannot be given one: make it
with the mode allow-list and no rules, if it is to get some later.`,
		Example:           "  dsec network work\n  dsec network work allow-list --allow 203.0.113.7,443 --allow 10.1.2.0/24,tcp,5432\n  dsec network work none",
		Args:              cobra.RangeArgs(1, 2),
		ValidArgsFunction: completeSandboxes(1),
		RunE: func(c *cobra.Command, args []string) error {
			return with(c, func(ctx context.Context, cl *client.Client) error {
				id, err := find(ctx, cl, args[0])
				if err != nil {
					return err
				}
				var sb client.Sandbox
				if len(args) == 1 {
					sb, err = cl.Get(ctx, id)
				} else {
					p := dsec.NetworkPolicy{Mode: dsec.NetworkMode(args[1]), Allow: parseRules(allow)}
					if err = p.Validate(); err == nil {
						sb, err = cl.SetNetwork(ctx, id, p)
					}
				}
				if err != nil {
					return err
				}
				now := network{NetworkState: networkOf(sb)}
				if len(args) == 1 && now.Generation > 0 {
					if now.Egress, err = egressOf(ctx, cl, id); err != nil {
						return err
					}
				}
				return show(c, now, func(w io.Writer) error { return describeNetwork(w, now) })
			})
		},
	}
	c.Flags().StringArrayVar(&allow, "allow", nil, allowHelp)
	return c
}

// network is what is shown.
type network struct {
	dsec.NetworkState
	Egress *dsec.Egress `json:"egress,omitempty"` // of one that lives
}

func egressOf(ctx context.Context, cl *client.Client, id dsec.SandboxID) (*dsec.Egress, error) {
	e, err := cl.Egress(ctx, id)
	switch dsec.ClassOf(err) {
	case dsec.SandboxGone, dsec.Unsupported:
		return nil, nil
	}
	return &e, err
}

// networkOf is what is in force.
func networkOf(sb client.Sandbox) dsec.NetworkState {
	if sb.Network != nil {
		return *sb.Network
	}
	n := dsec.NetworkState{NetworkPolicy: *sb.Spec.NetworkPolicy()}
	if n.Mode != "" && n.Mode != dsec.NetworkNone {
		n.Generation = 1
	}
	return n
}

func describeNetwork(w io.Writer, n network) error {
	if _, err := fmt.Fprintf(w, "%s, generation %d\n", n.Mode, n.Generation); err != nil {
		return err
	}
	for _, r := range n.Allow {
		if _, err := fmt.Fprintf(w, "  %s\n", ruleText(r)); err != nil {
			return err
		}
	}
	if n.Egress == nil || n.Egress.PacketsOut+n.Egress.PacketsRefused == 0 {
		return nil
	}
	return describeEgress(w, *n.Egress)
}

func describeEgress(w io.Writer, e dsec.Egress) error {
	if _, err := fmt.Fprintf(w, "packets: %d sent (%s), %d received, %d refused\n", e.PacketsOut, size(e.BytesOut), e.PacketsIn, e.PacketsRefused); err != nil {
		return err
	}
	if len(e.Rows) == 0 {
		return nil
	}
	var rows [][]string
	for _, r := range e.Rows {
		name, at, what := r.Name, "others", "let through"
		if r.Address != "" {
			at = net.JoinHostPort(r.Address, strconv.Itoa(int(r.Port)))
		}
		if r.Refused != "" {
			what = "refused: " + r.Refused
		}
		rows = append(rows, []string{name, at, strconv.FormatInt(r.Connections, 10), size(r.BytesOut), size(r.BytesIn), what})
	}
	return table(w, "NAME ADDRESS CONNECTIONS SENT RECEIVED VERDICT", rows)
}

// mirrorPrefix of --allow is followed by a service.
const mirrorPrefix = "mirror:"

// ruleText is a rule as --allow takes it.
func ruleText(r dsec.NetworkRule) string {
	if r.Mirror != "" {
		return mirrorPrefix + r.Mirror
	}
	parts := []string{r.Domain + r.CIDR}
	if r.Protocol != "" {
		parts = append(parts, r.Protocol)
	}
	return strings.Join(append(parts, r.Ports...), ",")
}

// parseRules reads --allow. What is wrong with a rule it says itself.
func parseRules(list []string) (out []dsec.NetworkRule) {
	for _, s := range list {
		parts := strings.Split(s, ",")
		r := dsec.NetworkRule{Domain: parts[0]}
		if service, ok := strings.CutPrefix(parts[0], mirrorPrefix); ok {
			r = dsec.NetworkRule{Mirror: service}
		}
		if _, err := netip.ParseAddr(parts[0]); err == nil || strings.Contains(parts[0], "/") {
			r = dsec.NetworkRule{CIDR: parts[0]}
		}
		for _, p := range parts[1:] {
			switch p {
			case "tcp", "udp", "icmp", "any":
				r.Protocol = p
			default:
				r.Ports = append(r.Ports, p)
			}
		}
		out = append(out, r)
	}
	return out
}

// Package veth gives a sandbox one end of a veth pair. The other ends are in
// one router namespace per node, which forwards to the node behind NAT and
// holds the rules; destroying it destroys them all.
package veth

import (
	"context"
	"net/netip"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/netpolicy"
)

// Config of a Network.
type Config struct {
	Name   string         // of the router, unique on the machine, at most 8 of [a-z0-9]
	Subnet netip.Prefix   // for sandboxes, IPv4, /8 to /28; zero: a free one is looked for
	Deny   []netip.Prefix // what no sandbox reaches; nil: DefaultDeny
	Allow  []netip.Prefix // exceptions to Deny
	DNS    []netip.Addr   // nil: the node's own that are not loopback; allowed on port 53 even if denied
	Keeper Keeper         // nil: the router ends with Close
}

// Keeper stores descriptors by name beyond the life of this process; it is
// the same as diskpool's.
type Keeper = interface{}

// Open finds or makes the router.
func Open(ctx context.Context, c Config) (netpolicy.Network, error) {
	return nil, dsec.Errorf(dsec.Unsupported, "open network", c.Name, "not built yet")
}

// Package veth gives a sandbox one end of a veth pair. The other ends are in
// one router namespace per node, which holds the rules and forwards to the
// node over a pair of its own, behind NAT; the node forwards to the outside.
//
//	sandbox ─eth0──────v12─ router ─up──────dsec-NAME─ node ── outside
//	10.x.0.18/32            10.x.0.1     10.x.0.3   10.x.0.2
//
// A sandbox's link and route exist in the router as long as its namespace
// does. What it may reach a netpolicy.Gate says at the router's end of its link;
// the rules of the router, which are the same for all, forward what has the
// gate's mark and nothing else, so without a gate nothing passes. A connection
// beyond the most a sandbox may have is dropped and counted. The router is kept by its descriptor
// only; when the last one closes, every link goes with it.
//
// What is left on the node is one nftables table, the other end of the router's
// link, and that the node forwards; Remove takes them away, the last only if the
// node did not forward before and has no other network of ours.
package veth

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"regexp"
	"sync"

	"github.com/vishvananda/netlink"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/netpolicy"
)

// Config of a Network.
type Config struct {
	Name   string         // of the router, unique on the machine, 1 to 8 of [a-z0-9]
	Subnet netip.Prefix   // for sandboxes, IPv4, /8 to /24; zero: the first free one of Subnets
	Gate   netpolicy.Gate // of the router's namespace
	Deny   []netip.Prefix // what is closed unless a rule opens a part of it; nil: DefaultDeny
	Never  []netip.Prefix // what no rule opens, besides metadata addresses and the subnet
	Allow  []netip.Prefix // exceptions to Deny of the mode open
	DNS    []netip.Addr   // nil: the node's own that are not loopback; open on port 53 even if denied
	Mirror bool           // a mirror of packages is served on what ListenMirror gives
	Conns  int            // that a sandbox may have at once; 0: DefaultConns
	Keeper Keeper         // nil: the router ends with Close
	Node   *os.File       // network namespace that leads outside; nil: the caller's own
}

// Keeper stores descriptors by name beyond the life of this process.
type Keeper interface {
	// Get returns a new descriptor, or NotFound.
	Get(ctx context.Context, name string) (*os.File, error)
	// Put stores a duplicate of f.
	Put(ctx context.Context, name string, f *os.File) error
	// Drop forgets it; unknown names are no error.
	Drop(ctx context.Context, name string) error
}

// Network is one router.
type Network struct {
	c       Config
	subnet  netip.Prefix
	node    *os.File // network namespace
	router  *os.File // network namespace
	links   *space   // in the router
	names   netpolicy.Egress
	unwatch chan struct{} // nil: links are not watched

	// closing is held for reading while a link is made ahead, which goes on until its
	// maker is told to stop, and that may be after Close.
	closing sync.RWMutex

	mu   sync.Mutex
	next uint32                  // offset of the address to try first
	ends map[dsec.SandboxID]*end // of sandboxes that have a link; some that are gone
	// ready are links of no sandbox yet, by the numbers of their namespaces; some that are gone.
	ready map[uint64]*link

	byAddr map[netip.Addr]*end
	byLink map[int]*end
	made   int // links since the gate was swept
}

var _ netpolicy.Network = (*Network)(nil)

// Offsets in the subnet. Sandboxes begin at firstSandbox.
const (
	gatewayOffset = 1
	nodeOffset    = 2
	routerOffset  = 3
	firstSandbox  = 16
)

// DefaultConns is far more than a program needs and a small part of what a node
// can follow.
const DefaultConns = 4096

const uplink = "up" // name of the router's end

const nodePrefix = "dsec-" // of the names of the nodes' ends

var validName = regexp.MustCompile(`^[a-z0-9]{1,8}$`)

func (c *Config) nodeLink() string   { return nodePrefix + c.Name }
func (c *Config) keeperName() string { return "router-" + c.Name }

// Open finds or makes the router and puts its rules in force.
func Open(ctx context.Context, c Config) (*Network, error) {
	const op = "open network"
	if !validName.MatchString(c.Name) {
		return nil, dsec.Errorf(dsec.Invalid, op, dsec.Quote(c.Name), "want %s", validName)
	}
	if c.Conns == 0 {
		c.Conns = DefaultConns
	}
	if c.Gate == nil {
		return nil, dsec.Errorf(dsec.Invalid, op, c.Name, "no gate")
	}
	n := &Network{c: c, next: firstSandbox, ends: map[dsec.SandboxID]*end{}, byAddr: map[netip.Addr]*end{}, byLink: map[int]*end{}, ready: map[uint64]*link{}}
	if err := n.open(ctx); err != nil {
		_ = n.Close()
		if _, ok := errors.AsType[*dsec.Error](err); ok {
			return nil, err
		}
		return nil, dsec.E(dsec.Internal, op, c.Name, err)
	}
	return n, nil
}

func (n *Network) open(ctx context.Context) (err error) {
	if n.node, err = nodeNamespace(n.c.Node); err != nil {
		return err
	}
	if n.c.DNS == nil {
		n.c.DNS = nodeDNS("/etc/resolv.conf", "/run/systemd/resolve/resolv.conf")
	}
	if n.c.Deny == nil {
		n.c.Deny = DefaultDeny()
	}
	if n.c.Keeper != nil {
		n.router, err = n.c.Keeper.Get(ctx, n.c.keeperName())
		if err != nil && !errors.Is(err, dsec.NotFound.Err()) {
			return err
		}
	}
	if n.router != nil {
		err = n.adopt()
	} else {
		err = n.build(ctx)
	}
	if err != nil {
		return err
	}
	if err := n.applyRules(ctx); err != nil {
		return err
	}
	return n.gateAll()
}

// adopt takes over a router that another process made, with its subnet.
func (n *Network) adopt() (err error) {
	if n.links, err = rawSpaceIn(n.router); err != nil {
		return err
	}
	lo, err := n.links.LinkByName("lo")
	if err != nil {
		return err
	}
	addrs, err := n.links.AddrList(lo, netlink.FAMILY_V4)
	if err != nil {
		return err
	}
	for _, a := range addrs {
		ip, ok := netip.AddrFromSlice(a.IP.To4())
		if !ok || ip.IsLoopback() {
			continue
		}
		// The label of the gateway's address carries the size of the subnet.
		var bits int
		if _, err := fmt.Sscanf(a.Label, "lo:%d", &bits); err == nil {
			n.subnet = netip.PrefixFrom(ip, bits).Masked()
			return nil
		}
	}
	return dsec.Errorf(dsec.Corrupt, "adopt network", n.c.Name, "its namespace has no gateway address")
}

// build makes the router, its link to the node and its addresses.
func (n *Network) build(ctx context.Context) (err error) {
	host, err := rawSpaceIn(n.node)
	if err != nil {
		return err
	}
	defer host.Close()
	if n.subnet, err = chooseSubnet(host, n.c.Subnet); err != nil {
		return err
	}
	if err := n.alone(host); err != nil {
		return err
	}
	if n.router, err = newNamespace(); err != nil {
		return err
	}
	if n.links, err = rawSpaceIn(n.router); err != nil {
		return err
	}
	if err := inNamespace(n.router, routerSysctls); err != nil {
		return err
	}
	if old, err := host.LinkByName(n.c.nodeLink()); err == nil {
		if err := host.LinkDel(old); err != nil { // of a router nobody kept
			return fmt.Errorf("delete link %s: %w", n.c.nodeLink(), err)
		}
	}
	if err := n.connectNode(ctx, host); err != nil {
		return err
	}
	if n.c.Keeper != nil {
		return n.c.Keeper.Put(ctx, n.c.keeperName(), n.router)
	}
	return nil
}

func (n *Network) connectNode(ctx context.Context, host *space) error {
	if err := addPair(host, pair{name: n.c.nodeLink(), peer: uplink, peerNS: n.router}); err != nil {
		return err
	}
	nodeEnd, routerEnd := n.address(nodeOffset), n.address(routerOffset)
	if err := setAddress(host, n.c.nodeLink(), nodeEnd, 31, ""); err != nil {
		return err
	}
	if err := setAddress(n.links, uplink, routerEnd, 31, ""); err != nil {
		return err
	}
	if err := waitUp(ctx, host, n.c.nodeLink()); err != nil {
		return err
	}
	lo, err := n.links.LinkByName("lo")
	if err == nil {
		err = n.links.LinkSetUp(lo)
	}
	if err != nil {
		return err
	}
	if err := setAddress(n.links, "lo", n.Gateway(), 32, fmt.Sprintf("lo:%d", n.subnet.Bits())); err != nil {
		return err
	}
	return addRoute(n.links, uplink, netip.Prefix{}, nodeEnd)
}

// Subnet is the one in use.
func (n *Network) Subnet() netip.Prefix { return n.subnet }

// Gateway is every sandbox's.
func (n *Network) Gateway() netip.Addr { return n.address(gatewayOffset) }

// Close lets go without disconnecting anybody, unless there is no Keeper.
func (n *Network) Close() error {
	n.closing.Lock()
	defer n.closing.Unlock()
	if n.unwatch != nil {
		close(n.unwatch)
		n.unwatch = nil
	}
	if n.links != nil {
		n.links.Close()
		n.links = nil
	}
	for _, f := range []**os.File{&n.router, &n.node} {
		if *f != nil {
			_ = (*f).Close()
			*f = nil
		}
	}
	return nil
}

// Clean takes away what a network of that name left on the node, when there is
// nothing to open it with. Its router ends with whoever keeps it.
func Clean(ctx context.Context, c Config) error {
	n := &Network{c: c}
	n.c.Keeper = nil
	var err error
	if n.node, err = nodeNamespace(c.Node); err != nil {
		return dsec.E(dsec.Internal, "remove network", c.Name, err)
	}
	defer func() { _ = n.Close() }()
	return n.Remove(ctx)
}

// Remove disconnects everybody, takes what is on the node away, and closes.
func (n *Network) Remove(ctx context.Context) error {
	const op = "remove network"
	host, err := spaceIn(n.node)
	if err != nil {
		return dsec.E(dsec.Internal, op, n.c.Name, err)
	}
	defer host.Close()
	if l, err := host.LinkByName(n.c.nodeLink()); err == nil {
		if err := host.LinkDel(l); err != nil {
			return dsec.E(dsec.Internal, op, n.c.Name, err)
		}
	}
	if err := n.unforward(ctx); err != nil {
		return dsec.E(dsec.Internal, op, n.c.Name, err)
	}
	if n.c.Keeper != nil {
		if err := n.c.Keeper.Drop(ctx, n.c.keeperName()); err != nil {
			return dsec.E(dsec.ClassOf(err), op, n.c.Name, err)
		}
	}
	return n.Close()
}

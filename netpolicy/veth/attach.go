package veth

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/within"
	"github.com/opendsec/dsec/netpolicy"
)

// sandboxLink is the name of a sandbox's end; linkPrefix begins the others'.
const (
	sandboxLink = "eth0"
	linkPrefix  = "v"
)

// Attach connects a namespace that was never connected, or only prepared.
func (n *Network) Attach(ctx context.Context, id dsec.SandboxID, p dsec.NetworkPolicy, at netpolicy.Place) (netpolicy.Lease, error) {
	const op = "connect network of"
	plan, err := n.compile(p)
	if err != nil {
		return netpolicy.Lease{}, dsec.E(dsec.ClassOf(err), op, string(id), err)
	}
	l, err := n.prepared(at)
	if err != nil {
		return netpolicy.Lease{}, dsec.E(dsec.ClassOf(err), op, string(id), err)
	}
	if !at.Link && (p.Mode == "" || p.Mode == dsec.NetworkNone) {
		if l != nil {
			return netpolicy.Lease{}, dsec.Errorf(dsec.IllegalState, op, string(id), "its namespace was prepared and has a link, and the mode %s has none", dsec.NetworkNone)
		}
		return netpolicy.Lease{Mode: dsec.NetworkNone}, nil
	}
	if l == nil {
		l, err = n.link(ctx, at)
	}
	if err == nil {
		e := n.newEnd(id, l.index, l.addr, plan)
		e.policy = p
		err = n.connect(ctx, e, at)
	}
	if err != nil {
		if _, ok := errors.AsType[*dsec.Error](err); ok {
			return netpolicy.Lease{}, err
		}
		return netpolicy.Lease{}, dsec.E(dsec.Internal, op, string(id), err)
	}
	return netpolicy.Lease{Mode: p.Mode, Address: l.addr, Gateway: n.Gateway(), DNS: n.servers(p.Mode)}, nil
}

// connect gives a link to its sandbox.
func (n *Network) connect(ctx context.Context, e *end, at netpolicy.Place) error {
	if err := n.gate(ctx, e); err != nil {
		return err
	}
	if b, ok := n.c.Gate.(netpolicy.Binder); ok && at.Group != 0 {
		if err := b.Bind(e.index, at.Group); err != nil {
			return err
		}
	}
	// The alias is what Live reports.
	if err := n.links.LinkSetAlias(byIndex(e.index), string(e.id)); err != nil {
		return fmt.Errorf("name link of %s: %w", e.addr, err)
	}
	return nil
}

// defaultRoute goes through a neighbour that need not be in the link's own prefix.
func defaultRoute(l netlink.Link, via netip.Addr) *netlink.Route {
	return &netlink.Route{LinkIndex: l.Attrs().Index, Gw: net.IP(via.AsSlice()), Flags: int(netlink.FLAG_ONLINK)}
}

// waitUp returns when the kernel has started a link, which it does some time
// after both ends were brought up. What is sent before is lost, and the next
// try is a second later.
func waitUp(ctx context.Context, s *space, name string) error {
	ctx, cancel := context.WithTimeout(ctx, startTime)
	defer cancel()
	for wait := 20 * time.Microsecond; ; wait = min(2*wait, 5*time.Millisecond) {
		l, err := s.LinkByName(name)
		if err != nil || l.Attrs().OperState == netlink.OperUp {
			return err
		}
		if within.Sleep(ctx, wait) != nil {
			return fmt.Errorf("start link %s: %w", name, context.Cause(ctx))
		}
	}
}

// startTime is far more than a link takes.
const startTime = 5 * time.Second

// claim makes a pair with the next free address. Its name says which, and the
// kernel refuses a name that is in use: there is no list that could be wrong.
func (n *Network) claim(ns *os.File) (*link, error) {
	last := uint32(1)<<(32-n.subnet.Bits()) - 2
	for range last {
		n.mu.Lock()
		offset := n.next
		if n.next++; n.next > last {
			n.next = firstSandbox
		}
		n.mu.Unlock()
		name := linkPrefix + fmt.Sprint(offset)
		err := addPair(n.links, pair{name: name, peer: sandboxLink, peerNS: ns})
		if err == nil {
			return &link{name: name, addr: n.address(offset)}, nil
		}
		if !errors.Is(err, unix.EEXIST) || n.taken(ns) {
			return nil, err
		}
	}
	return nil, dsec.Errorf(dsec.ResourceExhausted, "connect network", n.c.Name, "no free address in %s", n.subnet)
}

// taken reports whether a namespace has its link already, which is the other
// reason for EEXIST.
func (n *Network) taken(ns *os.File) bool {
	h, err := spaceIn(ns)
	if err != nil {
		return true
	}
	defer h.Close()
	_, err = h.LinkByName(sandboxLink)
	return err == nil
}

// Live lists the sandboxes that have a link.
func (n *Network) Live(context.Context) ([]dsec.SandboxID, error) {
	links, err := n.links.LinkList()
	if err != nil {
		return nil, dsec.E(dsec.Internal, "list links of network", n.c.Name, err)
	}
	var ids []dsec.SandboxID
	for _, l := range links {
		if a := l.Attrs(); strings.HasPrefix(a.Name, linkPrefix) && a.Alias != "" {
			ids = append(ids, dsec.SandboxID(a.Alias))
		}
	}
	return ids, nil
}

func (n *Network) address(offset uint32) netip.Addr {
	base := n.subnet.Addr().As4()
	v := binary.BigEndian.Uint32(base[:]) + offset
	return netip.AddrFrom4([4]byte{byte(v >> 24), byte(v >> 16), byte(v >> 8), byte(v)})
}

// pair is a veth whose ends are in two namespaces.
type pair struct {
	name   string
	peer   string
	peerNS *os.File
}

// addPair makes both ends in their places with one request: moving an end later
// takes longer than all the rest. Both are down. Each has one queue from the beginning: else it is born with
// one for each CPU, and the kernel waits for an RCU grace period for each end to
// take them away again, while nobody else may change a link.
func addPair(s *space, p pair) error {
	one := nl.Uint32Attr(1)
	req := nl.NewNetlinkRequest(unix.RTM_NEWLINK, unix.NLM_F_CREATE|unix.NLM_F_EXCL|unix.NLM_F_ACK)
	req.Sockets = s.raw
	req.AddData(nl.NewIfInfomsg(unix.AF_UNSPEC))
	req.AddData(nl.NewRtAttr(unix.IFLA_IFNAME, nl.ZeroTerminated(p.name)))
	req.AddData(nl.NewRtAttr(unix.IFLA_NUM_TX_QUEUES, one))
	req.AddData(nl.NewRtAttr(unix.IFLA_NUM_RX_QUEUES, one))
	info := nl.NewRtAttr(unix.IFLA_LINKINFO, nil)
	info.AddRtAttr(nl.IFLA_INFO_KIND, []byte("veth"))
	peer := info.AddRtAttr(nl.IFLA_INFO_DATA, nil).AddRtAttr(nl.VETH_INFO_PEER, nil)
	peer.AddChild(nl.NewIfInfomsg(unix.AF_UNSPEC))
	peer.AddRtAttr(unix.IFLA_IFNAME, nl.ZeroTerminated(p.peer))
	peer.AddRtAttr(unix.IFLA_NUM_TX_QUEUES, one)
	peer.AddRtAttr(unix.IFLA_NUM_RX_QUEUES, one)
	peer.AddRtAttr(unix.IFLA_NET_NS_FD, nl.Uint32Attr(uint32(p.peerNS.Fd())))
	req.AddData(info)
	if _, err := req.Execute(unix.NETLINK_ROUTE, 0); err != nil {
		return fmt.Errorf("make link %s: %w", p.name, err)
	}
	return nil
}

// setAddress gives a link an address, and brings it up.
func setAddress(h *space, link string, a netip.Addr, bits int, label string) error {
	l, err := h.LinkByName(link)
	if err == nil {
		err = h.AddrAdd(l, &netlink.Addr{IPNet: prefixNet(a, bits), Label: label})
	}
	if err == nil && l.Attrs().Flags&net.FlagUp == 0 {
		err = h.LinkSetUp(l)
	}
	if err != nil {
		return fmt.Errorf("set address %s on %s: %w", a, link, err)
	}
	return nil
}

// addRoute adds a route through a neighbour; the zero prefix is the default
// route.
func addRoute(h *space, link string, to netip.Prefix, via netip.Addr) error {
	l, err := h.LinkByName(link)
	if err == nil {
		r := defaultRoute(l, via)
		if to.IsValid() {
			r.Dst = prefixNet(to.Addr(), to.Bits())
		}
		err = h.RouteAdd(r)
	}
	if err != nil {
		return fmt.Errorf("add route by %s on %s: %w", via, link, err)
	}
	return nil
}

func prefixNet(a netip.Addr, bits int) *net.IPNet {
	return &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(bits, 32)}
}

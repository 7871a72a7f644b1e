package veth

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/netpolicy"
)

var _ netpolicy.Preparer = (*Network)(nil)

// link is a pair that leads to a namespace, judged by the gate, which has nothing
// open for it yet.
type link struct {
	name  string // of the router's end
	index int    // of it
	addr  netip.Addr
	rate  int64 // bytes a second, each way; 0: not bounded
}

// Prepare implements netpolicy.Preparer.
func (n *Network) Prepare(ctx context.Context, at netpolicy.Place) error {
	const op = "prepare network of"
	n.closing.RLock()
	defer n.closing.RUnlock()
	if n.links == nil {
		return dsec.Errorf(dsec.Unavailable, op, at.NetNS.Name(), "the network is closed")
	}
	number, err := numberOf(at.NetNS)
	if err != nil {
		return dsec.E(dsec.Internal, op, at.NetNS.Name(), err)
	}
	l, err := n.link(ctx, at)
	if err != nil {
		if _, ok := errors.AsType[*dsec.Error](err); ok {
			return err
		}
		return dsec.E(dsec.Internal, op, at.NetNS.Name(), err)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.ready[number] = l
	return nil
}

// prepared takes the link that was made ahead for a namespace; nil: none was.
func (n *Network) prepared(at netpolicy.Place) (*link, error) {
	if at.NetNS == nil {
		return nil, nil
	}
	number, err := numberOf(at.NetNS)
	if err != nil {
		return nil, err
	}
	n.mu.Lock()
	l := n.ready[number]
	delete(n.ready, number)
	n.mu.Unlock()
	if l == nil {
		return nil, nil
	}
	// The number of a namespace is another's only when all its links are gone.
	index, err := n.links.index(l.name)
	if errors.Is(err, unix.ENODEV) || err == nil && index != l.index {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if l.rate != at.Rate {
		return nil, dsec.Errorf(dsec.Invalid, "take prepared link", l.name, "it carries %d bytes a second, asked for %d", l.rate, at.Rate)
	}
	return l, nil
}

// numberOf is what tells a namespace from all others there are.
func numberOf(ns *os.File) (uint64, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(ns.Fd()), &st); err != nil {
		return 0, os.NewSyscallError("fstat", err)
	}
	return st.Ino, nil
}

// link makes one, with all that is the same for every sandbox. It is judged before
// it is up, and so before there is a packet. That is quicker, too: for whatever is
// attached to a link that is up, the kernel stops it for an RCU grace period.
func (n *Network) link(ctx context.Context, at netpolicy.Place) (*link, error) {
	var s *space
	// New links of the namespace are born without IPv6; lo keeps its ::1.
	err := inNamespace(at.NetNS, func() (err error) {
		if err = sysctl("net/ipv6/conf/default/disable_ipv6", "1"); err == nil {
			s, err = spaceHere()
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	defer s.Close()
	l, err := n.claim(at.NetNS)
	if err != nil {
		return nil, err
	}
	l.rate = at.Rate
	if l.index, err = n.links.index(l.name); err != nil {
		return nil, fmt.Errorf("find link %s: %w", l.name, err)
	}
	if err := inNamespace(n.router, func() error { return n.c.Gate.Attach(l.index) }); err != nil {
		return nil, err
	}
	end := byIndex(l.index)
	if err := shape(n.links, end, at.Rate); err != nil { // what comes to it
		return nil, err
	}
	// The sandbox's end is last, and works at once; the other one is waited for.
	if err := n.links.LinkSetUp(end); err != nil {
		return nil, fmt.Errorf("set up %s: %w", l.name, err)
	}
	if err := inside(s, l, n.Gateway()); err != nil {
		return nil, fmt.Errorf("set up %s: %w", sandboxLink, err)
	}
	if err := n.links.RouteAdd(&netlink.Route{LinkIndex: l.index, Dst: prefixNet(l.addr, 32), Scope: netlink.SCOPE_LINK}); err != nil {
		return nil, fmt.Errorf("route %s to %s: %w", l.addr, l.name, err)
	}
	if err := waitUp(ctx, n.links, l.name); err != nil {
		return nil, err
	}
	return l, n.count()
}

// inside gives the sandbox's end its address and the way out.
func inside(s *space, of *link, gateway netip.Addr) error {
	index, err := s.index(sandboxLink)
	if err != nil {
		return err
	}
	l := byIndex(index)
	if err := shape(s, l, of.rate); err != nil { // which nobody inside may change
		return err
	}
	if err := s.LinkSetUp(l); err != nil {
		return err
	}
	if err := s.AddrAdd(l, &netlink.Addr{IPNet: prefixNet(of.addr, 32)}); err != nil {
		return err
	}
	return s.RouteAdd(defaultRoute(l, gateway))
}

// byIndex is a link of which only the index matters.
func byIndex(index int) netlink.Link {
	return &netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: index}}
}

// count has the gate forget links that are gone, now and then.
func (n *Network) count() error {
	n.mu.Lock()
	n.made++
	sweep := n.made%sweepEvery == 0
	n.mu.Unlock()
	if !sweep {
		return nil
	}
	links, err := n.links.LinkList()
	if errors.Is(err, netlink.ErrDumpInterrupted) {
		return nil // so many come and go: another time
	}
	if err != nil {
		return fmt.Errorf("list links: %w", err)
	}
	return n.sweep(links)
}

package veth

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/netpolicy"
)

// sweepEvery is after how many new links the gate forgets those that are gone.
const sweepEvery = 256

// compile makes the plan of a policy on the ground of this network.
func (n *Network) compile(p dsec.NetworkPolicy) (netpolicy.Plan, error) {
	g := netpolicy.Ground{Closed: n.c.Deny, Never: append(always(), n.subnet), Allow: n.c.Allow}
	g.Never = append(g.Never, n.c.Never...)
	if n.c.Mirror {
		g.Mirror = n.Gateway()
	}
	for _, a := range n.servers(p.Mode) {
		g.Serves = append(g.Serves, netpolicy.DNS(a))
	}
	return netpolicy.Compile(p.Mode, p.Allow, g)
}

// servers are the name servers of a mode: of an allow-list our own, which is also
// there, last, for the day on which an open one becomes an allow-list.
func (n *Network) servers(m dsec.NetworkMode) []netip.Addr {
	if m == dsec.NetworkAllow || m == dsec.NetworkMirror {
		return []netip.Addr{n.Gateway()}
	}
	return append(slices.Clone(n.c.DNS[:min(len(n.c.DNS), maxServers-1)]), n.Gateway())
}

// maxServers is how many programs look at.
const maxServers = 3

// gate opens what the plan of a new end says.
func (n *Network) gate(ctx context.Context, e *end) error {
	if err := e.tell(ctx, 1); err != nil {
		return err
	}
	if err := n.c.Gate.Add(e.index, e.addr, e.plan); err != nil {
		return err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.ends[e.id], n.byAddr[e.addr], n.byLink[e.index] = e, e, e
	return nil
}

// Asker is the sandbox that has an address.
func (n *Network) Asker(a netip.Addr) (e interface {
	Opens(name string) []netpolicy.Ports
	Free() bool
	MirrorAt(name string) (netip.Addr, bool)
	MayLeadTo(a netip.Addr) bool
	Pin(name string, addrs []netip.Addr, ttl time.Duration) error
}, ok bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	x, ok := n.byAddr[a]
	return x, ok
}

// ListenDNS gives the sockets on which sandboxes whose network is an allow-list ask.
func (n *Network) ListenDNS() (udp net.PacketConn, tcp net.Listener, err error) {
	at := netip.AddrPortFrom(n.Gateway(), 53).String()
	err = inNamespace(n.router, func() (err error) {
		if udp, err = net.ListenPacket("udp4", at); err != nil {
			return err
		}
		if tcp, err = net.Listen("tcp4", at); err != nil {
			return errors.Join(err, udp.Close())
		}
		return nil
	})
	if err != nil {
		return nil, nil, dsec.E(dsec.Internal, "listen for questions", at, err)
	}
	return udp, tcp, nil
}

// ListenMirror gives the socket on which sandboxes ask the mirror of packages.
func (n *Network) ListenMirror() (l net.Listener, err error) {
	at := netip.AddrPortFrom(n.Gateway(), netpolicy.MirrorPort).String()
	if err = inNamespace(n.router, func() error { l, err = net.Listen("tcp4", at); return err }); err != nil {
		return nil, dsec.E(dsec.Internal, "listen for the mirror", at, err)
	}
	return l, nil
}

// Policy is what was asked for of the sandbox that has an address; ok is false as
// long as that is not known, which is after a start of this process until Restore.
func (n *Network) Policy(a netip.Addr) (p dsec.NetworkPolicy, ok bool) {
	n.mu.Lock()
	e := n.byAddr[a]
	n.mu.Unlock()
	if e == nil {
		return p, false
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.policy, e.policy.Mode != ""
}

// Whose is the sandbox that has an address, and the generation of its policy.
func (n *Network) Whose(a netip.Addr) (id dsec.SandboxID, generation uint64, ok bool) {
	n.mu.Lock()
	e := n.byAddr[a]
	n.mu.Unlock()
	if e == nil {
		return "", 0, false
	}
	return e.id, n.c.Gate.Generation(e.index), true
}

// InNode runs f where the outside is reached.
func (n *Network) InNode(f func() error) error {
	if n.c.Node == nil { // here
		return f()
	}
	return inNamespace(n.node, f)
}

// Servers are the node's name servers.
func (n *Network) Servers() []netip.Addr { return n.c.DNS }

// sweep forgets links that are gone.
func (n *Network) sweep(links []netlink.Link) error {
	live, last := map[int]bool{}, 0
	for _, l := range links {
		live[l.Attrs().Index] = true
		last = max(last, l.Attrs().Index)
	}
	var gone []*end
	n.mu.Lock()
	for index, e := range n.byLink {
		if live[index] || index > last { // newer than the list
			continue
		}
		delete(n.byLink, index)
		if n.ends[e.id] == e { // else it was started again
			delete(n.ends, e.id)
		}
		if n.byAddr[e.addr] == e { // the address may be another's by now
			delete(n.byAddr, e.addr)
			gone = append(gone, e)
		}
	}
	for number, l := range n.ready {
		if !live[l.index] && l.index <= last {
			delete(n.ready, number)
		}
	}
	n.mu.Unlock()
	for _, e := range gone {
		if n.names != nil {
			n.names.Forget(e.addr, e.id)
		}
	}
	return n.c.Gate.Sweep(live)
}

// gateAll finds the links of sandboxes that are there, and judges those that
// nobody does: an earlier version, which had only the mode open, has made them.
func (n *Network) gateAll() error {
	links, err := n.links.LinkList()
	if err != nil {
		return fmt.Errorf("list links: %w", err)
	}
	if err := n.sweep(links); err != nil {
		return err
	}
	open, err := n.compile(dsec.NetworkPolicy{Mode: dsec.NetworkOpen})
	if err != nil {
		return err
	}
	for _, l := range links {
		a := l.Attrs()
		var offset uint32
		if _, err := fmt.Sscanf(a.Name, linkPrefix+"%d", &offset); err != nil || a.Alias == "" {
			continue
		}
		e := n.newEnd(dsec.SandboxID(a.Alias), a.Index, n.address(offset), netpolicy.Plan{})
		n.ends[e.id], n.byAddr[e.addr], n.byLink[e.index] = e, e, e
		if err := inNamespace(n.router, func() error { return n.c.Gate.Attach(e.index) }); err != nil {
			return err
		}
		if n.c.Gate.Generation(a.Index) != 0 {
			continue
		}
		if err := n.c.Gate.Add(e.index, e.addr, open); err != nil {
			return err
		}
	}
	return nil
}

// Change implements netpolicy.Network.
func (n *Network) Change(ctx context.Context, id dsec.SandboxID, p dsec.NetworkPolicy, ns *os.File) (generation uint64, err error) {
	const op = "change network policy of"
	plan, err := n.compile(p)
	if err != nil {
		return 0, dsec.E(dsec.ClassOf(err), op, string(id), err)
	}
	e := n.end(id)
	if e == nil {
		return 0, dsec.Errorf(dsec.IllegalState, op, string(id), "it was made without a network; give it the mode %s, with or without rules, to change that later", dsec.NetworkAllow)
	}
	e.turn.Lock()
	defer e.turn.Unlock()
	e.ask(p)
	before, generation, err := e.change(plan)
	if err == nil {
		err = errors.Join(cut(ns, e, before), e.tell(ctx, generation))
	}
	if err != nil {
		return 0, dsec.E(classOf(err), op, string(id), err)
	}
	return generation, nil
}

func (n *Network) end(id dsec.SandboxID) *end {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.ends[id]
}

// Restore implements netpolicy.Network.
func (n *Network) Restore(ctx context.Context, id dsec.SandboxID, p dsec.NetworkPolicy) error {
	const op = "restore network policy of"
	plan, err := n.compile(p)
	if err != nil {
		return dsec.E(dsec.ClassOf(err), op, string(id), err)
	}
	e := n.end(id)
	if e == nil {
		return dsec.Errorf(dsec.NotFound, op, string(id), "it has no link")
	}
	e.mu.Lock()
	e.plan, e.policy = plan, p
	e.mu.Unlock()
	if err := e.tell(ctx, n.c.Gate.Generation(e.index)); err != nil {
		return dsec.E(classOf(err), op, string(id), err)
	}
	return nil
}

package veth

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"sync"

	"github.com/vishvananda/netlink"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/netpolicy"
)

// linkEnd is the router's end of a sandbox's link, and the sandbox's address.
type linkEnd struct {
	index int
	addr  netip.Addr
	turn  *sync.Mutex // held while its policy changes
}

// sweepEvery is after how many new links the gate forgets those that are gone.
const sweepEvery = 256

// compile makes the plan of a policy on the ground of this network.
func (n *Network) compile(p dsec.NetworkPolicy) (netpolicy.Plan, error) {
	g := netpolicy.Ground{Closed: n.c.Deny, Never: append(always(), n.subnet), Allow: n.c.Allow}
	g.Never = append(g.Never, n.c.Never...)
	for _, a := range n.c.DNS {
		g.Serves = append(g.Serves, netpolicy.DNS(a))
	}
	return netpolicy.Compile(p.Mode, p.Allow, g)
}

// gate begins to judge what comes from a new link.
func (n *Network) gate(id dsec.SandboxID, e linkEnd, plan netpolicy.Plan) error {
	if err := inNamespace(n.router, func() error { return n.c.Gate.Add(e.index, e.addr, plan) }); err != nil {
		return err
	}
	e.turn = &sync.Mutex{}
	n.mu.Lock()
	n.ends[id] = e
	n.made++
	sweep := n.made%sweepEvery == 0
	n.mu.Unlock()
	if !sweep {
		return nil
	}
	links, err := n.links.LinkList()
	if err != nil {
		return fmt.Errorf("list links: %w", err)
	}
	return n.sweep(links)
}

// sweep forgets links that are gone.
func (n *Network) sweep(links []netlink.Link) error {
	live, last := map[int]bool{}, 0
	for _, l := range links {
		live[l.Attrs().Index] = true
		last = max(last, l.Attrs().Index)
	}
	n.mu.Lock()
	for id, e := range n.ends {
		if !live[e.index] && e.index <= last { // else it is newer than the list
			delete(n.ends, id)
		}
	}
	n.mu.Unlock()
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
		if _, err := fmt.Sscanf(a.Name, linkPrefix+"%d", &offset); err != nil || !strings.HasPrefix(a.Name, linkPrefix) {
			continue
		}
		e := linkEnd{a.Index, n.address(offset), &sync.Mutex{}}
		if a.Alias != "" {
			n.ends[dsec.SandboxID(a.Alias)] = e
		}
		if a.Alias == "" || n.c.Gate.Has(a.Index) {
			continue
		}
		if err := inNamespace(n.router, func() error { return n.c.Gate.Add(e.index, e.addr, open) }); err != nil {
			return err
		}
	}
	return nil
}

// Change implements netpolicy.Network.
func (n *Network) Change(_ context.Context, id dsec.SandboxID, p dsec.NetworkPolicy, ns *os.File) (generation uint64, err error) {
	const op = "change network policy of"
	plan, err := n.compile(p)
	if err != nil {
		return 0, dsec.E(dsec.ClassOf(err), op, string(id), err)
	}
	n.mu.Lock()
	e, ok := n.ends[id]
	n.mu.Unlock()
	if !ok {
		return 0, dsec.Errorf(dsec.IllegalState, op, string(id), "it was made without a network; give it the mode %s, with or without rules, to change that later", dsec.NetworkAllow)
	}
	e.turn.Lock()
	defer e.turn.Unlock()
	if generation, err = n.c.Gate.Apply(e.index, plan); err == nil {
		err = cut(ns, plan)
	}
	if err != nil {
		return 0, dsec.E(dsec.Internal, op, string(id), err)
	}
	return generation, nil
}

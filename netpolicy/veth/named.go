package veth

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/linux"
	"github.com/opendsec/dsec/netpolicy"
)

// namesPort is where, on the gateway's address, connections arrive that a name
// alone has opened.
const namesPort = 15443

// NamesAt is where names are looked at.
func (n *Network) NamesAt() netip.AddrPort { return netip.AddrPortFrom(n.Gateway(), namesPort) }

// Router returns a new descriptor of the router's network namespace.
func (n *Network) Router() (*os.File, error) { return linux.Duplicate(n.router) }

// InRouter runs f where sandboxes connect to.
func (n *Network) InRouter(f func() error) error { return inNamespace(n.router, f) }

// LookAt has names looked at from now on, which is said once, before anything is
// attached, changed or restored. What was handed out before is known again.
func (n *Network) LookAt(x netpolicy.Egress) error {
	gone := map[netip.Addr]dsec.SandboxID{}
	n.mu.Lock()
	n.names = x
	for _, a := range x.Addresses() {
		known, _ := x.Known(a)
		if e := n.byAddr[a]; e == nil || e.id != known.Sandbox {
			gone[a] = known.Sandbox
		}
	}
	for _, e := range n.byAddr {
		e.recall(x)
	}
	n.mu.Unlock()
	for a, id := range gone {
		x.Forget(a, id)
	}
	return n.watchLinks()
}

// watchLinks ends the connections of sandboxes when they go: who looks at names
// would learn of it only from those that do not answer any more. What is missed the
// next sweep sees.
func (n *Network) watchLinks() error {
	at, changes := netns.NsHandle(int(n.router.Fd())), make(chan netlink.LinkUpdate, 256)
	if n.unwatch != nil {
		close(n.unwatch)
	}
	n.unwatch = make(chan struct{})
	if err := netlink.LinkSubscribeWithOptions(changes, n.unwatch, netlink.LinkSubscribeOptions{Namespace: &at}); err != nil {
		return dsec.E(dsec.Internal, "watch links of", n.c.Name, err)
	}
	go func() {
		for c := range changes {
			if c.Header.Type != unix.RTM_DELLINK {
				continue
			}
			if e := n.at(int(c.Index)); e != nil {
				n.names.Forget(e.addr, e.id)
			}
		}
	}()
	return nil
}

// recall learns what an earlier process has handed out, as far as it is open still.
func (e *end) recall(x netpolicy.Egress) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.names = x
	known, ok := x.Known(e.addr)
	if !ok || known.Sandbox != e.id {
		return
	}
	for _, a := range e.gate.Pinned(e.index) {
		if names := known.Pins[a]; len(names) > 0 && e.pins[a] == nil {
			e.pins[a] = &pin{names: slices.Clone(names), until: time.Now().Add(leastPin)}
		}
	}
}

// tell has what is to be looked at in force; it returns when connections that it
// does not admit are dead.
func (e *end) tell(ctx context.Context, generation uint64) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.tellLocked(ctx, generation)
}

func (e *end) tellLocked(ctx context.Context, generation uint64) error {
	if e.names == nil {
		return nil
	}
	a := netpolicy.Admitted{Sandbox: e.id, Address: e.addr, Generation: generation, Free: e.plan.Free, Pins: map[netip.Addr][]string{}}
	for _, x := range e.plan.Names {
		if said(x.Open) {
			a.Names = append(a.Names, x)
		}
	}
	for addr, p := range e.pins {
		for _, name := range p.names {
			if said(e.plan.Opens(name)) {
				a.Pins[addr] = append(a.Pins[addr], name)
			}
		}
	}
	if _, known := e.names.Known(e.addr); !known && len(a.Names) == 0 {
		return nil
	}
	return e.names.Set(ctx, a)
}

// handOutLocked has addresses known as those of a name before anybody is told.
func (e *end) handOutLocked(name string, addrs []netip.Addr) error {
	if e.names == nil || !said(e.plan.Opens(name)) {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), tellWithin)
	defer cancel()
	err := e.names.Pin(ctx, e.addr, name, addrs)
	if !errors.Is(err, dsec.ResourceExhausted.Err()) || !e.forgetLocked() {
		return err
	}
	if err := e.tellLocked(ctx, e.gate.Generation(e.index)); err != nil {
		return err
	}
	return e.names.Pin(ctx, e.addr, name, addrs)
}

// tellWithin is as long as who asks for a name waits.
const tellWithin = 5 * time.Second

// said tells whether names are looked at where this is open.
func said(open []netpolicy.Ports) bool {
	return netpolicy.Opens(open, unix.IPPROTO_TCP, netpolicy.TLSPort) || netpolicy.Opens(open, unix.IPPROTO_TCP, netpolicy.HTTPPort)
}

// unseen says that a connection was opened by a rule of addresses, and now is not.
func (e *end) unseen(to netip.Addr, port uint16, before netpolicy.Plan) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return (port == netpolicy.TLSPort || port == netpolicy.HTTPPort) && before.Allows(to, unix.IPPROTO_TCP, port) && !e.plan.Allows(to, unix.IPPROTO_TCP, port)
}

// classOf keeps the class of an error that has one.
func classOf(err error) dsec.Class {
	if e, ok := errors.AsType[*dsec.Error](err); ok {
		return e.Class
	}
	return dsec.Internal
}

// Egress implements netpolicy.Network.
func (n *Network) Egress(ctx context.Context, id dsec.SandboxID) (dsec.Egress, error) {
	const op = "read egress of"
	out := dsec.Egress{Rows: []dsec.EgressRow{}}
	e := n.end(id)
	if e == nil {
		return out, dsec.Errorf(dsec.NotFound, op, string(id), "it has no link")
	}
	c, err := n.c.Gate.Counts(e.index)
	if err != nil {
		return out, dsec.E(dsec.Internal, op, string(id), err)
	}
	out.PacketsOut, out.BytesOut, out.PacketsIn, out.PacketsRefused = c.Out, c.OutBytes, c.In, c.Refused
	if n.names == nil {
		return out, nil
	}
	rows, err := n.names.Rows(ctx, e.addr)
	if err != nil {
		return out, dsec.E(classOf(err), op, string(id), err)
	}
	out.Rows = append(out.Rows, rows...)
	return out, nil
}

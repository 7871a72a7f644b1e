package veth

import (
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/netpolicy"
)

// How long what a name has stays open, whatever its records say: programs remember
// addresses longer than they should, and a connection is prolonged by its use.
const (
	leastPin = 5 * time.Minute
	mostPin  = time.Hour
	maxPins  = 4096 // addresses of one sandbox
)

// end is the router's end of a sandbox's link: what is in force there.
type end struct {
	gate  netpolicy.Gate
	names netpolicy.Egress // nil: nobody looks at names, and nothing passes where they are to be
	id    dsec.SandboxID
	index int
	addr  netip.Addr // of the sandbox

	turn sync.Mutex // held while its policy changes

	mu     sync.Mutex
	plan   netpolicy.Plan
	policy dsec.NetworkPolicy  // that the plan was made of; no mode: not known
	pins   map[netip.Addr]*pin // those of which the names are known
}

// pin is an address that names have.
type pin struct {
	names []string
	until time.Time // as far as is known here; use prolongs it
}

func (n *Network) newEnd(id dsec.SandboxID, index int, a netip.Addr, plan netpolicy.Plan) *end {
	return &end{gate: n.c.Gate, names: n.names, id: id, index: index, addr: a, plan: plan, pins: map[netip.Addr]*pin{}}
}

// Opens is what is open of the addresses of a name.
func (e *end) Opens(name string) []netpolicy.Ports {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.plan.Opens(name)
}

// MirrorAt is where a name of the mirror leads.
func (e *end) MirrorAt(name string) (netip.Addr, bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.plan.MirrorAt(name)
}

// ask says what policy the plan that is in force, or will be, is made of.
func (e *end) ask(p dsec.NetworkPolicy) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.policy = p
}

// Free says whether every name may be asked for.
func (e *end) Free() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.plan.Free
}

// MayLeadTo says whether a name may have an address.
func (e *end) MayLeadTo(a netip.Addr) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.plan.MayLeadTo(a)
}

// Pin opens addresses for a name that has them.
func (e *end) Pin(name string, addrs []netip.Addr, ttl time.Duration) error {
	const op = "pin name"
	e.mu.Lock()
	defer e.mu.Unlock()
	if len(e.plan.Opens(name)) == 0 { // the policy has changed meanwhile
		return dsec.Errorf(dsec.PermissionDenied, op, dsec.Quote(name), "no rule opens it any more")
	}
	if err := e.handOutLocked(name, addrs); err != nil {
		return dsec.E(dsec.ClassOf(err), op, dsec.Quote(name), err)
	}
	ttl = min(max(ttl, leastPin), mostPin)
	for _, a := range addrs {
		p := e.pins[a]
		if p == nil {
			if len(e.pins) >= maxPins && !e.forgetLocked() {
				return dsec.Errorf(dsec.ResourceExhausted, op, dsec.Quote(name), "%d addresses are open to this sandbox", maxPins)
			}
			p = &pin{}
			e.pins[a] = p
		}
		p.names = netpolicy.AddName(p.names, name)
		if until := time.Now().Add(ttl); until.After(p.until) {
			p.until = until
		}
		if err := e.gate.Pin(e.index, a, e.openLocked(p), time.Until(p.until)); err != nil {
			return dsec.E(dsec.Internal, op, dsec.Quote(name), err)
		}
	}
	return nil
}

// openLocked is what the names of an address open together. If that is more than
// fits, the last one counts.
func (e *end) openLocked(p *pin) []netpolicy.Ports {
	var all []netpolicy.Ports
	for _, name := range p.names {
		all = append(all, e.plan.Opens(name)...)
	}
	if open, err := netpolicy.MergePorts(all); err == nil {
		return open
	}
	return e.plan.Opens(p.names[len(p.names)-1])
}

// forgetLocked makes room: of what nobody has asked for lately.
func (e *end) forgetLocked() (some bool) {
	for a, p := range e.pins {
		if time.Now().After(p.until) && e.gate.Unpin(e.index, a) == nil {
			delete(e.pins, a)
			some = true
		}
	}
	return some
}

// change puts another plan in force. Pins of names that it does not open, and those
// of which nobody knows the names any more, are closed before that.
func (e *end) change(plan netpolicy.Plan) (before netpolicy.Plan, generation uint64, err error) {
	e.mu.Lock()
	before, e.plan = e.plan, plan
	err = e.repinLocked()
	e.mu.Unlock()
	if err == nil {
		generation, err = e.gate.Apply(e.index, plan)
	}
	return before, generation, err
}

func (e *end) repinLocked() error {
	for _, a := range e.gate.Pinned(e.index) {
		p := e.pins[a]
		if p != nil {
			p.names = slices.DeleteFunc(p.names, func(name string) bool { return len(e.plan.Opens(name)) == 0 })
		}
		if p == nil || len(p.names) == 0 || !e.plan.MayLeadTo(a) {
			delete(e.pins, a)
			if err := e.gate.Unpin(e.index, a); err != nil {
				return err
			}
			continue
		}
		if err := e.gate.Pin(e.index, a, e.openLocked(p), max(time.Until(p.until), leastPin)); err != nil {
			return err
		}
	}
	return nil
}

// opens says whether something is open now, by the plan or by a name.
func (e *end) opens(a netip.Addr, protocol uint8, port uint16) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.plan.Allows(a, protocol, port) {
		return true
	}
	p := e.pins[a.Unmap()]
	return p != nil && netpolicy.Opens(e.openLocked(p), protocol, port)
}

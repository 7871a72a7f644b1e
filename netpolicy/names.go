package netpolicy

import (
	"context"
	"net/netip"

	"github.com/opendsec/dsec"
)

// Admitted is what a sandbox may reach by name: the rules, and which addresses
// were handed out for which names.
type Admitted struct {
	Sandbox    dsec.SandboxID          `json:"sandbox"`
	Address    netip.Addr              `json:"address"` // of the sandbox
	Generation uint64                  `json:"generation"`
	Free       bool                    `json:"free,omitempty"` // by the mode open: connections that are there live on
	Names      []Name                  `json:"names,omitempty"`
	Pins       map[netip.Addr][]string `json:"pins,omitempty"` // canonical names, by address
}

// MaxNames is how many names of one address are remembered, those that were asked
// for last; MaxPairs how many names of addresses of one sandbox.
const (
	MaxNames = 64
	MaxPairs = 8192
)

// Admits says whether a name was handed out for an address, and opens a port of it.
func (a *Admitted) Admits(name string, to netip.AddrPort) bool {
	for _, n := range a.Pins[to.Addr()] {
		if n == name {
			return Opens(Plan{Names: a.Names}.Opens(name), tcp, to.Port())
		}
	}
	return false
}

// AddName adds one to those of an address, and forgets the oldest of too many.
func AddName(names []string, name string) []string {
	for _, n := range names {
		if n == name {
			return names
		}
	}
	if len(names) >= MaxNames {
		names = names[1:]
	}
	return append(names[:len(names):len(names)], name)
}

// Egress looks at what is said on HTTPPort and TLSPort where a name alone has opened an address.
// What it was told is in force until it is told something else; without anything
// it lets nothing pass. Errors: Unavailable if it does not answer.
type Egress interface {
	// Set replaces what a sandbox may reach. When it returns, connections that it
	// does not admit are dead.
	Set(ctx context.Context, a Admitted) error
	// Pin adds addresses that are about to be handed out for a name.
	Pin(ctx context.Context, sandbox netip.Addr, name string, addrs []netip.Addr) error
	// Forget ends all of a sandbox that is gone; who has its address by now is
	// spared. It need not be done at once.
	Forget(sandbox netip.Addr, id dsec.SandboxID)
	// Known is what is in force for a sandbox, by whomever.
	Known(sandbox netip.Addr) (Admitted, bool)
	// Rows is what one has reached by name, and what it was refused.
	Rows(ctx context.Context, sandbox netip.Addr) ([]dsec.EgressRow, error)
	// Addresses lists the sandboxes that are known.
	Addresses() []netip.Addr
}

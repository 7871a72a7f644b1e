package egress

import (
	"maps"
	"net/netip"
	"slices"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/netpolicy"
)

// Bounds of what one sandbox may have, which the agent keeps too.
const (
	maxRules     = 512
	maxAddresses = 4096
	maxName      = 253
)

// table is what sandboxes may reach, by their addresses. Agent and server have the
// same one. It has no lock.
type table map[netip.Addr]*netpolicy.Admitted

// pin adds addresses for a name. What a sandbox has is replaced, not changed: others
// may read it.
func (t table) pin(sandbox netip.Addr, name string, addrs []netip.Addr) error {
	const op = "pin name"
	old := t[sandbox]
	if old == nil {
		return dsec.Errorf(dsec.NotFound, op, dsec.Quote(name), "no sandbox has %s", sandbox)
	}
	now := *old
	if now.Pins = maps.Clone(old.Pins); now.Pins == nil {
		now.Pins = map[netip.Addr][]string{}
	}
	for _, a := range addrs {
		now.Pins[a] = netpolicy.AddName(now.Pins[a], name)
	}
	if err := valid(now); err != nil {
		return err
	}
	t[sandbox] = &now
	return nil
}

// valid checks the size of what came from outside.
func valid(a netpolicy.Admitted) error {
	const op = "read what a sandbox may reach"
	bad := func(format string, args ...any) error {
		return dsec.Errorf(dsec.Invalid, op, dsec.Quote(string(a.Sandbox)), format, args...)
	}
	switch {
	case !a.Address.Is4():
		return bad("address %s is none of IPv4", a.Address)
	case a.Sandbox == "":
		return bad("no sandbox")
	case len(a.Names) > maxRules:
		return bad("%d rules, at most %d", len(a.Names), maxRules)
	case len(a.Pins) > maxAddresses:
		return dsec.Errorf(dsec.ResourceExhausted, op, dsec.Quote(string(a.Sandbox)), "%d addresses, at most %d", len(a.Pins), maxAddresses)
	}
	pairs := 0
	for addr, names := range a.Pins {
		pairs += len(names)
		if !addr.Is4() || len(names) > netpolicy.MaxNames || slices.ContainsFunc(names, func(n string) bool { return len(n) > maxName }) {
			return bad("names of address %s", addr)
		}
	}
	if pairs > netpolicy.MaxPairs {
		return dsec.Errorf(dsec.ResourceExhausted, op, dsec.Quote(string(a.Sandbox)), "%d names of addresses, at most %d", pairs, netpolicy.MaxPairs)
	}
	return nil
}

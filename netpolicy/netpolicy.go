// Package netpolicy is the contract of what a sandbox may reach.
//
// Mode "none" gives loopback only, in a network namespace without any other
// interface. Mode "open" gives one interface whose packets are routed to the
// outside behind the node's address; they never reach another sandbox, any
// address of the node itself, the control plane, link-local or metadata
// addresses, nor a range that the configuration denies. Mode "allow-list" gives
// the same interface, and opens what the rules of the policy say and nothing else.
// IPv6 is closed. docs/formats/netpolicy.md says it all.
//
// A policy is compiled to a Plan, which is a value; a Gate puts it in force at the
// host's end of the sandbox's link, where no packet gets by, whoever made it.
//
// Lifecycle: the network namespace exists first and belongs to the sandbox.
// Attach connects it; the connection ends with the namespace, and only so:
// deleting a link is slow, deleting its namespace is not. There is nothing to
// detach. An address is used again only when the kernel has let go of the link
// that had it.
//
// Most of what connecting takes is the same for all sandboxes. A Network that is a
// Preparer does that ahead, in a namespace that belongs to no sandbox yet: there is
// a link then by which nothing passes. Attach only puts the policy in force on it.
// A link is used once and goes with its namespace, used or not.
package netpolicy

import (
	"context"
	"net/netip"
	"os"

	"github.com/opendsec/dsec"
)

// Lease is what a sandbox was given.
type Lease struct {
	Mode    dsec.NetworkMode
	Address netip.Addr   // invalid without a link
	Gateway netip.Addr   // invalid without a link
	DNS     []netip.Addr // for resolv.conf; empty without a link
}

// Place is where the processes of a sandbox are, and what its link may carry.
type Place struct {
	NetNS *os.File // network namespace
	// Group is the number of its control group on the v2 tree; 0: none. What processes
	// in it try to reach, and may not, is refused before there is a packet, and told
	// with who has tried. Where that cannot be, packets are still judged, and nothing
	// else changes.
	Group uint64
	Rate  int64 // bytes a second, each way; 0: what the machine can
	// Link has it linked also where its policy is none, and nothing open: a later one may open it.
	Link bool
}

// Network connects network namespaces.
type Network interface {
	// Attach connects a namespace that was never connected. With an error the
	// namespace may be half connected and must be destroyed by its owner.
	Attach(ctx context.Context, id dsec.SandboxID, p dsec.NetworkPolicy, at Place) (Lease, error)
	// Change puts another policy in force on a sandbox that was attached. When it
	// returns, what the new one does not open is closed, and connections that were
	// open there are dead. IllegalState for a sandbox without a link.
	Change(ctx context.Context, id dsec.SandboxID, p dsec.NetworkPolicy, netns *os.File) (generation uint64, err error)
	// Restore says what is in force on a sandbox that another process attached, so
	// that the names of its policy can be asked for. NotFound if it has no link.
	Restore(ctx context.Context, id dsec.SandboxID, p dsec.NetworkPolicy) error
	// Egress is what a sandbox has reached, and what it was refused. NotFound if it
	// has no link.
	Egress(ctx context.Context, id dsec.SandboxID) (dsec.Egress, error)
	// Live lists the sandboxes that have a link.
	Live(ctx context.Context) ([]dsec.SandboxID, error)
	// Close lets go without disconnecting anybody.
	Close() error
}

// Preparer is a Network that makes links before it is known whose they are.
type Preparer interface {
	// Prepare links a namespace that was never connected. It belongs to no sandbox and
	// Live knows nothing of it; no IP packet passes until Attach, which is given the
	// same namespace and rate, and a mode other than none or a Place with Link. Whoever does not want it any
	// more destroys the namespace, which is all there is to undo, also after an error.
	// Processes to come know of no link that was prepared: they cannot attach it.
	Prepare(ctx context.Context, at Place) error
}

// ResolvConf is the content of /etc/resolv.conf.
func (l Lease) ResolvConf() []byte {
	var b []byte
	for _, a := range l.DNS {
		b = append(b, "nameserver "+a.String()+"\n"...)
	}
	if len(b) > 0 {
		b = append(b, "options timeout:2 attempts:2\n"...)
	}
	return b
}

// Hosts is the content of /etc/hosts.
func (l Lease) Hosts(hostname string) []byte {
	b := []byte("127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n")
	addr := "127.0.1.1"
	if l.Address.IsValid() {
		addr = l.Address.String()
	}
	if hostname == "" || hostname == "localhost" {
		return b
	}
	return append(b, addr+"\t"+hostname+"\n"...)
}

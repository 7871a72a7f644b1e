package netpolicy

import (
	"net/netip"
	"strconv"
	"time"
)

// Marks that packets of sandboxes have behind a Gate. Whoever forwards lets
// nothing pass that has not the first.
const (
	MarkOpen    = 0x64730001 // a plan opens it
	MarkRefused = 0x64730002 // none does
	MarkRouter  = 0x64730003 // who forwards has made it, to say so
	MarkName    = 0x64730004 // a name opens it, if it is the one that is said in it
)

// Ports of TCP where only what says an allowed name passes, if a name alone has
// opened the address.
const (
	HTTPPort = 80
	TLSPort  = 443
)

// Of the refusals of one sandbox so many at once are told, and then one each time; the
// others are counted.
const (
	TellBurst = 32
	TellEvery = time.Second
)

// Refusal is a packet that nothing opens, or a try to make one.
type Refusal struct {
	Link       int
	Address    netip.Addr
	Protocol   uint8
	Port       uint16 // 0 of what has none
	Generation uint64 // of the link's plan
	PID        int    // of the machine, of who tried; 0: a packet, whose maker is not known
	UID        uint32 // of the machine, of who tried
	Program    string // the name of the thread that tried, which it gives itself
}

// String is like "tcp 203.0.113.7:443".
func (r Refusal) String() string {
	name := map[uint8]string{icmp: "icmp", tcp: "tcp", udp: "udp"}[r.Protocol]
	if name == "" {
		name = "protocol " + strconv.Itoa(int(r.Protocol))
	}
	if r.Port == 0 {
		return name + " " + r.Address.String()
	}
	return name + " " + netip.AddrPortFrom(r.Address, r.Port).String()
}

// Counts are packets of a link.
type Counts struct {
	Out, OutBytes int64 // from the sandbox, that were opened
	In            int64 // to it, but of connections that the router has taken
	Refused       int64 // from it
}

// Gate puts plans in force on links, each of which leads to one sandbox with one
// address, in the network namespace of the calling thread. What is in force stays
// so while nobody runs, until the link goes. Methods may be called at one time;
// for one link, one after the other.
type Gate interface {
	// Attach has the packets of a link judged by this process's programs, instead of
	// those of an earlier version if there are any. By a link that nobody has added no
	// IP packet passes.
	Attach(link int) error
	// Add begins with a link that Attach was called for: from now on a plan is in force
	// there.
	Add(link int, a netip.Addr, p Plan) error
	// Apply puts another plan in force, in one step. When it returns no packet is
	// under way that was judged by the one before. The generation of a link grows
	// by one each time, and is 1 after Add.
	Apply(link int, p Plan) (generation uint64, err error)
	// Pin opens an address of a link for some time, as a name that has it does; use
	// prolongs it. Pinning it again replaces what was open of it.
	Pin(link int, a netip.Addr, open []Ports, ttl time.Duration) error
	// Unpin closes what Pin has opened. It is in force when the next Apply returns.
	Unpin(link int, a netip.Addr) error
	// Pinned lists the addresses of a link that were pinned, by whomever, and not
	// unpinned; the time of some may be over.
	Pinned(link int) []netip.Addr
	// Refusals gives what is refused from now on as it comes, one at a time, until
	// stop. What comes faster than it is taken is only counted.
	Refusals(take func(Refusal)) (stop func(), err error)
	// Counts are of the packets of a link so far.
	Counts(link int) (Counts, error)
	// Generation is the link's; 0 if nobody has called Add for it.
	Generation(link int) uint64
	// Sweep forgets links that are gone. Those with a higher index than any that is
	// live are new: indexes grow, and are not used again.
	Sweep(live map[int]bool) error
}

// Binder is a Gate that also refuses before a packet is made.
type Binder interface {
	// Bind says which control group the processes of a link are in, by its number on
	// the v2 tree: what they try to reach is refused at once from now on, and told
	// with who has tried.
	Bind(link int, group uint64) error
}

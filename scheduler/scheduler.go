// Package scheduler decides where a sandbox goes. It is pure: a Plan follows
// from a snapshot of the nodes, a request and a source of randomness; there is
// no I/O and no clock in it.
//
// Place drops the nodes that cannot take the request, then draws two of the
// rest at random, weighted by capacity, and prefers the emptier one. A
// snapshot is always old: least-loaded placement on it sends a whole burst to
// one node, two random choices do not. Whoever commits a plan adds it to the
// InFlight of its node until a heartbeat tells the truth, and when the node
// refuses, goes on with the next one of the plan.
package scheduler

import (
	"fmt"
	"math/rand/v2"
	"strings"

	"github.com/opendsec/dsec"
)

// Node is what a snapshot says about a node.
type Node struct {
	ID       dsec.NodeID
	Tiers    []dsec.Tier
	Live     int     // sandboxes, those that start included
	MaxLive  int     // 0: unknown, counted as 1
	InFlight int     // placed here since the heartbeat that told Live
	CPU      float64 // committed fraction of the budget
	Memory   float64
	Disk     float64
	Draining bool
	Dead     bool // heartbeats stopped
}

// load is the fraction in use of what is scarcest.
func (n *Node) load() float64 {
	used := float64(n.Live+n.InFlight) / float64(n.capacity())
	return max(used, n.CPU, n.Memory, n.Disk)
}

func (n *Node) capacity() int { return max(n.MaxLive, 1) }

// Request is what has to be placed.
type Request struct {
	Tier    dsec.Tier
	Exclude []dsec.NodeID // refused already
}

// Plan is where to go, in order, and why not elsewhere.
type Plan struct {
	Order   []dsec.NodeID // the first is the choice, the rest is for refusals; at most MaxTries
	Reasons []Reason      // why a node is not in Order
}

// Reason says why a node cannot take a request.
type Reason struct {
	Node dsec.NodeID
	Why  string
}

// MaxTries is how many nodes a plan names at most.
const MaxTries = 5

// Place makes a plan, or says why there is none: Unavailable if no node is
// there, Unsupported if none has the tier, ResourceExhausted if all are full.
func Place(nodes []Node, r Request, rnd *rand.Rand) (Plan, error) {
	var p Plan
	var fit []*Node
	supported, alive := false, false
	for i := range nodes {
		n := &nodes[i]
		why := refusal(n, r)
		alive = alive || !n.Dead
		supported = supported || (!n.Dead && has(n.Tiers, r.Tier))
		if why != "" {
			p.Reasons = append(p.Reasons, Reason{n.ID, why})
			continue
		}
		fit = append(fit, n)
	}
	for len(fit) > 0 && len(p.Order) < MaxTries {
		i := pick(fit, rnd)
		p.Order = append(p.Order, fit[i].ID)
		fit = append(fit[:i], fit[i+1:]...)
	}
	if len(p.Order) > 0 {
		return p, nil
	}
	class := dsec.ResourceExhausted
	switch {
	case !alive:
		class = dsec.Unavailable
	case !supported:
		class = dsec.Unsupported
	}
	return p, dsec.Errorf(class, "place sandbox", string(r.Tier), "%s", p.why())
}

func refusal(n *Node, r Request) string {
	switch {
	case n.Dead:
		return "no heartbeat"
	case n.Draining:
		return "draining"
	case !has(n.Tiers, r.Tier):
		return "no tier " + string(r.Tier)
	case n.Live+n.InFlight >= n.capacity():
		return fmt.Sprintf("full: %d of %d", n.Live+n.InFlight, n.capacity())
	}
	for _, id := range r.Exclude {
		if id == n.ID {
			return "refused before"
		}
	}
	return ""
}

func has(tiers []dsec.Tier, t dsec.Tier) bool {
	for _, x := range tiers {
		if x == t {
			return true
		}
	}
	return false
}

// pick draws two and returns the index of the emptier.
func pick(fit []*Node, rnd *rand.Rand) int {
	if len(fit) == 1 {
		return 0
	}
	a, b := draw(fit, -1, rnd), 0
	b = draw(fit, a, rnd)
	if fit[b].load() < fit[a].load() {
		return b
	}
	return a
}

// draw picks an index other than not, weighted by capacity.
func draw(fit []*Node, not int, rnd *rand.Rand) int {
	total := 0
	for i, n := range fit {
		if i != not {
			total += n.capacity()
		}
	}
	at := rnd.IntN(total)
	for i, n := range fit {
		if i == not {
			continue
		}
		if at -= n.capacity(); at < 0 {
			return i
		}
	}
	return 0
}

func (p *Plan) why() string {
	if len(p.Reasons) == 0 {
		return "no node is registered"
	}
	const most = 5
	var b strings.Builder
	for i, r := range p.Reasons {
		if i == most {
			fmt.Fprintf(&b, " and %d more", len(p.Reasons)-most)
			break
		}
		if i > 0 {
			b.WriteString(", ")
		}
		fmt.Fprintf(&b, "node %s: %s", r.Node, r.Why)
	}
	return b.String()
}

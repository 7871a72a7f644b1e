package veth

import (
	"golang.org/x/time/rate"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/netpolicy"
)

// Refusals tells of packets that were refused, until stop: of each sandbox as many as
// netpolicy.TellBurst says, with how many of its packets were refused so far. Calls come
// one at a time.
func (n *Network) Refusals(take func(id dsec.SandboxID, r netpolicy.Refusal, refused int64)) (stop func(), err error) {
	told := map[int]*rate.Limiter{}
	return n.c.Gate.Refusals(func(r netpolicy.Refusal) {
		e := n.at(r.Link)
		if e == nil {
			return
		}
		if told[r.Link] == nil {
			if len(told) > maxTold {
				clear(told)
			}
			told[r.Link] = rate.NewLimiter(rate.Every(netpolicy.TellEvery), netpolicy.TellBurst)
		}
		if !told[r.Link].Allow() {
			return
		}
		counts, err := n.c.Gate.Counts(r.Link)
		if err != nil { // the link is gone
			return
		}
		take(e.id, r, counts.Refused)
	})
}

// maxTold bounds what is remembered of links, most of which are gone.
const maxTold = 1 << 16

// at finds who has a link.
func (n *Network) at(link int) *end {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.byLink[link]
}

package veth

import (
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/netpolicy"
)

// tellEvery is how far apart refusals of one sandbox are that are told; the others
// are counted.
const tellEvery = time.Second

// Refusals tells of packets that were refused, until stop: of each sandbox one a
// second, with how many of its packets were refused so far. Calls come one at a time.
func (n *Network) Refusals(take func(id dsec.SandboxID, r netpolicy.Refusal, refused int64)) (stop func(), err error) {
	told := map[int]time.Time{}
	return n.c.Gate.Refusals(func(r netpolicy.Refusal) {
		now := time.Now()
		if now.Sub(told[r.Link]) < tellEvery {
			return
		}
		e := n.at(r.Link)
		if e == nil {
			return
		}
		told[r.Link] = now
		if len(told) > maxTold {
			clear(told)
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

package egress

import (
	"cmp"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"github.com/opendsec/dsec"
)

// Rows of one sandbox. What it was refused has its own bound: it cannot hide what
// it has reached behind names that it has made up.
const (
	maxReached = 1024
	maxRefused = 256
)

// key is one row; without an address it is of all that had no room.
type key struct {
	name    string
	to      netip.AddrPort
	refused string
}

// row is written by the connections it counts.
type row struct {
	conns, out, in, last atomic.Int64 // last: Unix nanoseconds
}

func (r *row) used() { r.last.Store(time.Now().UnixNano()) }

// audit counts what one sandbox did. It has no lock; its rows need none.
type audit struct {
	rows             map[key]*row
	reached, refused int
}

func (a *audit) row(k key) *row {
	if r := a.rows[k]; r != nil {
		return r
	}
	n, most := &a.reached, maxReached
	if k.refused != "" {
		n, most = &a.refused, maxRefused
	}
	if *n >= most {
		k = key{refused: k.refused}
		if r := a.rows[k]; r != nil {
			return r
		}
	} else {
		*n++
	}
	r := &row{}
	a.rows[k] = r
	return r
}

// list has what was reached first, the last of it before the others.
func (a *audit) list() []dsec.EgressRow {
	out := make([]dsec.EgressRow, 0, len(a.rows))
	for k, r := range a.rows {
		e := dsec.EgressRow{Name: k.name, Refused: k.refused, Port: k.to.Port(), Connections: r.conns.Load(),
			BytesOut: r.out.Load(), BytesIn: r.in.Load(), Last: time.Unix(0, r.last.Load()).UTC()}
		if k.to.IsValid() {
			e.Address = k.to.Addr().String()
		}
		out = append(out, e)
	}
	slices.SortFunc(out, func(a, b dsec.EgressRow) int {
		return cmp.Or(cmp.Compare(a.Refused, b.Refused), b.Last.Compare(a.Last), cmp.Compare(a.Name, b.Name), cmp.Compare(a.Address, b.Address))
	})
	return out
}

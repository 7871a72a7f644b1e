package dns

import (
	"net/netip"

	"golang.org/x/time/rate"

	"github.com/opendsec/dsec/netpolicy"
)

// maxTold is how many addresses are remembered, most of which are gone.
const maxTold = 1 << 16

// refusals counts the questions of an address that no rule opens.
type refusals struct {
	count int64
	told  *rate.Limiter
}

// refuse tells of a name that no rule opens: of each address as many as
// netpolicy.TellBurst says, with how many of its questions were refused so far.
func (s *Server) refuse(from netip.Addr, name string) {
	if s.c.Refused == nil {
		return
	}
	s.mu.Lock()
	if s.refused == nil || len(s.refused) >= maxTold && s.refused[from] == nil {
		s.refused = map[netip.Addr]*refusals{}
	}
	r := s.refused[from]
	if r == nil {
		r = &refusals{told: rate.NewLimiter(rate.Every(netpolicy.TellEvery), netpolicy.TellBurst)}
		s.refused[from] = r
	}
	r.count++
	count, tell := r.count, r.told.Allow()
	s.mu.Unlock()
	if tell {
		s.c.Refused(from, name, count)
	}
}

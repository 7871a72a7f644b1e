package dns

import (
	"net/netip"
	"time"
)

const (
	tellEvery = time.Second // questions of one address that are refused are told so far apart
	maxTold   = 1 << 16     // addresses that are remembered, most of which are gone
)

// refusals counts the questions of an address that no rule opens.
type refusals struct {
	count int64
	told  time.Time
}

// refuse tells of a name that no rule opens: of each address one a second, with how many
// of its questions were refused so far.
func (s *Server) refuse(from netip.Addr, name string) {
	if s.c.Refused == nil {
		return
	}
	now := time.Now()
	s.mu.Lock()
	if s.refused == nil || len(s.refused) >= maxTold && s.refused[from] == nil {
		s.refused = map[netip.Addr]*refusals{}
	}
	r := s.refused[from]
	if r == nil {
		r = &refusals{}
		s.refused[from] = r
	}
	r.count++
	count, quiet := r.count, now.Sub(r.told) < tellEvery
	if !quiet {
		r.told = now
	}
	s.mu.Unlock()
	if !quiet {
		s.c.Refused(from, name, count)
	}
}

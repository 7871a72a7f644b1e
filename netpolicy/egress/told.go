package egress

import (
	"fmt"
	"net/netip"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/netpolicy"
)

// Refusal is a connection that was refused.
type Refusal struct {
	Sandbox    dsec.SandboxID `json:"sandbox"`
	Generation uint64         `json:"generation"` // of what it was told to let through
	Name       string         `json:"name,omitempty"`
	To         netip.AddrPort `json:"to"`
	Why        string         `json:"why"`
	Refused    int64          `json:"refused"` // connections of the sandbox so far
}

// String is like "tls other.example at 203.0.113.7:443: it is no allowed name".
func (r Refusal) String() string {
	what := "tls"
	if r.To.Port() == netpolicy.HTTPPort {
		what = "http"
	}
	if r.Name == "" {
		return fmt.Sprintf("%s at %s: %s", what, r.To, r.Why)
	}
	return fmt.Sprintf("%s %s at %s: %s", what, r.Name, r.To, r.Why)
}

// told is how many refusals wait for an agent that takes them; what is more is only
// counted.
const told = 256

// refuseLocked counts a refusal, and tells of as many as netpolicy.TellBurst says.
func (s *Server) refuseLocked(b *box, name string, to netip.AddrPort, why string) {
	r := b.audit.row(key{name: name, to: to, refused: why})
	r.conns.Add(1)
	r.used()
	b.refused++
	if len(s.watchers) == 0 || !b.told.Allow() {
		return
	}
	out := Refusal{Sandbox: b.id, Name: name, To: to, Why: why, Refused: b.refused}
	if a := s.table[b.addr]; a != nil {
		out.Generation = a.Generation
	}
	for w := range s.watchers {
		select {
		case w <- out:
		default:
		}
	}
}

// watch tells one agent of refusals until its connection ends.
func (s *Server) watch(send func(Refusal) error, ended <-chan struct{}) {
	w := make(chan Refusal, told)
	s.mu.Lock()
	s.watchers[w] = true
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		delete(s.watchers, w)
		s.mu.Unlock()
	}()
	for {
		select {
		case r := <-w:
			if send(r) != nil {
				return
			}
		case <-ended:
			return
		case <-s.ctx.Done():
			return
		}
	}
}

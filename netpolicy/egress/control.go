package egress

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"os"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/linux"
)

// Run takes agents until the listener is closed, or one of them is of another
// version or router, which is an error: another process is to take its place.
func (s *Server) Run(l *net.UnixListener) error {
	over := make(chan error, 1)
	if !s.holds(l) {
		return nil
	}
	defer s.lets(l)
	s.work.Go(func() {
		for {
			c, err := l.AcceptUnix()
			if err != nil {
				select {
				case over <- nil:
				default:
				}
				return
			}
			s.work.Go(func() {
				if err := s.converse(c); err != nil {
					select {
					case over <- err:
					default:
					}
				}
			})
		}
	})
	return <-over
}

func (s *Server) holds(c io.Closer) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.open == nil {
		_ = c.Close()
		return false
	}
	s.open[c] = true
	return true
}

func (s *Server) lets(c io.Closer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.open != nil {
		delete(s.open, c)
	}
	_ = c.Close()
}

// converse answers one agent. An error is one for which this process must end.
func (s *Server) converse(c *net.UnixConn) error {
	if !s.holds(c) {
		return nil
	}
	defer s.lets(c)
	router, hello, err := Greeted(c)
	if err != nil {
		s.c.Log.Warn("greeting of an agent not understood", "err", err)
		return nil
	}
	defer func() { _ = router.Close() }()
	if hello.Version != Version {
		return dsec.Errorf(dsec.Unsupported, "greet agent", "", "it speaks version %d, this process %d", hello.Version, Version)
	}
	if err := s.c.Inside(router); err != nil {
		return err
	}
	if err := s.listen(hello.Listen, hello.Conns); err != nil {
		return err
	}
	if write(c, reply{}) != nil {
		return nil
	}
	for {
		q, err := readRequest(c)
		if err != nil {
			if !errors.Is(err, io.EOF) && !errors.Is(err, net.ErrClosed) && !errors.Is(err, unix.ECONNRESET) {
				s.c.Log.Warn("request of an agent not understood", "err", err)
			}
			return nil
		}
		if q.Op == opWatch {
			s.stream(c)
			return nil
		}
		r, err := s.answer(q)
		if err != nil {
			r = reply{Class: dsec.ClassOf(err), Error: err.Error()}
		}
		if write(c, r) != nil {
			return nil
		}
	}
}

// stream tells of refusals until the agent has gone.
func (s *Server) stream(c *net.UnixConn) {
	gone := make(chan struct{})
	s.work.Go(func() {
		defer close(gone)
		_, _ = c.Read(make([]byte, 1)) // it says nothing more
	})
	if write(c, reply{}) == nil {
		s.watch(func(r Refusal) error { return write(c, reply{Refusal: &r}) }, gone)
	}
	_ = c.Close()
	<-gone
}

func (s *Server) answer(q request) (reply, error) {
	switch {
	case q.Op == opSet && q.Admitted != nil:
		s.set(*q.Admitted)
		return reply{}, nil
	case q.Op == opPin:
		s.mu.Lock()
		defer s.mu.Unlock()
		return reply{}, s.table.pin(q.Sandbox, q.Name, q.Addresses)
	case q.Op == opForget:
		s.forget(q.Sandbox, q.ID)
		return reply{}, nil
	case q.Op == opAddresses:
		return reply{Addresses: s.addresses()}, nil
	case q.Op == opGet:
		s.mu.Lock()
		defer s.mu.Unlock()
		return reply{Admitted: s.table[q.Sandbox]}, nil
	case q.Op == opAudit:
		s.mu.Lock()
		defer s.mu.Unlock()
		if b := s.boxes[q.Sandbox]; b != nil {
			return reply{Rows: b.audit.list()}, nil
		}
		return reply{}, nil
	}
	return reply{}, dsec.Errorf(dsec.Invalid, "answer agent", dsec.Quote(q.Op), "no such request")
}

// Sandbox is who has an address: for what else the router may serve to those that
// are known here.
func (s *Server) Sandbox(a netip.Addr) (id dsec.SandboxID, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if b := s.boxes[a]; b != nil {
		return b.id, true
	}
	return "", false
}

func (s *Server) addresses() (all []netip.Addr) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for a := range s.table {
		all = append(all, a)
	}
	return all
}

// Greeting is the first that an agent says.
type Greeting struct {
	Version int
	Listen  netip.AddrPort
	Conns   int
}

// Greeted reads a greeting, with which comes the network namespace of the router.
func Greeted(c *net.UnixConn) (router *os.File, g Greeting, err error) {
	const op = "read greeting"
	b, oob := make([]byte, 1), make([]byte, unix.CmsgSpace(4*4))
	n, oobn, _, _, err := c.ReadMsgUnix(b, oob)
	if err != nil || n == 0 {
		return nil, g, dsec.E(dsec.Invalid, op, "", errors.Join(err, io.ErrUnexpectedEOF))
	}
	fds, err := linux.Received(oob[:oobn])
	if err != nil {
		return nil, g, dsec.E(dsec.Invalid, op, "", err)
	}
	if len(fds) != 1 || b[0] != 0 {
		for _, fd := range fds {
			_ = unix.Close(fd)
		}
		return nil, g, dsec.Errorf(dsec.Invalid, op, "", "%d descriptors, want 1", len(fds))
	}
	router = os.NewFile(uintptr(fds[0]), "router")
	q, err := readRequest(c)
	if err == nil && q.Op != opGreet {
		err = dsec.Errorf(dsec.Invalid, op, dsec.Quote(q.Op), "want %s", opGreet)
	}
	if err != nil {
		_ = router.Close()
		return nil, g, err
	}
	return router, Greeting{q.Version, q.Listen, q.Conns}, nil
}

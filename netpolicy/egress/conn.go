package egress

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"time"

	"github.com/opendsec/dsec/netpolicy"
	"github.com/opendsec/dsec/netpolicy/hello"
)

// Why connections are refused, besides what package hello says.
const (
	whyName    = "it is no allowed name"
	whyAddress = "the address was not handed out for it"
	whyMany    = "too many connections at once"
)

// conn is one connection. The server's lock guards its fields.
type conn struct {
	box       *box
	to        netip.AddrPort
	client    *net.TCPConn
	servers   []net.Conn
	name      string // that was admitted
	dead      bool
	transport *http.Transport // of one that speaks HTTP
	ctx       context.Context
	cancel    context.CancelFunc
	done      chan struct{} // closed when nothing of it is left
}

// killLocked ends it at once, for both sides.
func (c *conn) killLocked() {
	c.dead = true
	c.cancel()
	reset(c.client)
	for _, server := range c.servers {
		reset(server)
	}
}

// reset closes a connection so that the other side is told it failed.
func reset(c net.Conn) {
	if t, ok := c.(*net.TCPConn); ok {
		_ = t.SetLinger(0)
	}
	_ = c.Close()
}

// serve looks at a connection and joins it to whom it was meant for.
func (s *Server) serve(client *net.TCPConn) {
	c := s.enter(client)
	if c == nil {
		reset(client)
		return
	}
	defer s.leave(c)
	if c.to.Port() == netpolicy.HTTPPort {
		s.asked(c)
		s.serveWeb(c)
		return
	}
	name, said, err := s.ask(client)
	s.asked(c)
	if s.admit(c, name, err) != "" {
		refuse(client, said)
		return
	}
	server, r, err := s.reach(c.ctx, c, name)
	if err != nil {
		return
	}
	if _, err := server.Write(said); err == nil {
		r.out.Add(int64(len(said)))
		c.join(server.(*net.TCPConn), r)
	}
}

// reach connects to whom a connection was meant for, if it may still be.
func (s *Server) reach(ctx context.Context, c *conn, name string) (net.Conn, *row, error) {
	ctx, cancel := context.WithTimeout(ctx, dialWithin)
	defer cancel()
	server, err := s.c.Dial(ctx, c.to)
	if err != nil {
		return nil, nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if c.dead {
		reset(server)
		return nil, nil, net.ErrClosed
	}
	c.servers = append(c.servers, server)
	r := c.box.audit.row(key{name: name, to: c.to})
	r.conns.Add(1)
	r.used()
	return server, r, nil
}

// lost forgets a connection that has ended before its client.
func (s *Server) lost(c *conn, server net.Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c.servers = slices.DeleteFunc(c.servers, func(x net.Conn) bool { return x == server })
}

// asked gives the place back of one that has not said whom it wants.
func (s *Server) asked(c *conn) {
	s.mu.Lock()
	c.box.asking--
	s.mu.Unlock()
	<-s.slots
}

// enter finds a place for a connection; nil: there is none.
func (s *Server) enter(client *net.TCPConn) *conn {
	from := addrOf(client.RemoteAddr())
	to, err := s.c.Original(client)
	if err != nil {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	b := s.boxes[from]
	if b == nil || s.open == nil {
		return nil
	}
	full := len(b.conns) >= s.own || b.asking >= ownHandshakes || s.live >= s.c.Places
	if !full {
		select {
		case s.slots <- struct{}{}:
		default:
			full = true
		}
	}
	if full {
		s.refuseLocked(b, "", to, whyMany)
		return nil
	}
	c := &conn{box: b, to: to, client: client, done: make(chan struct{})}
	c.ctx, c.cancel = context.WithCancel(s.ctx)
	b.conns[c] = true
	b.asking++
	s.live++
	return c
}

// leave gives the place back.
func (s *Server) leave(c *conn) {
	s.mu.Lock()
	reset(c.client) // which does nothing to one that is closed
	for _, server := range c.servers {
		reset(server)
	}
	c.cancel()
	delete(c.box.conns, c)
	s.live--
	s.mu.Unlock()
	close(c.done)
}

// ask reads whom the client wants, and returns all that it has said.
func (s *Server) ask(client *net.TCPConn) (name string, said []byte, err error) {
	_ = client.SetReadDeadline(time.Now().Add(helloWithin))
	defer func() { _ = client.SetReadDeadline(time.Time{}) }()
	said = make([]byte, 0, 2048)
	for {
		if len(said) == cap(said) {
			said = append(make([]byte, 0, 2*cap(said)), said...)
		}
		n, err := client.Read(said[len(said):min(cap(said), hello.Max)])
		said = said[:len(said)+n]
		if n > 0 {
			name, herr := hello.Name(said)
			if !errors.Is(herr, hello.ErrShort) {
				return name, said, herr
			}
			if len(said) >= hello.Max {
				return "", said, hello.ErrSize
			}
		}
		if err != nil {
			return "", said, hello.ErrShort
		}
	}
}

// admit judges what was said; why is "" if it may pass.
func (s *Server) admit(c *conn, name string, said error) (why string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	a := s.table[c.box.addr]
	switch {
	case c.dead || a == nil:
		return whyName
	case said != nil:
		why = said.Error()
	case !netpolicy.Opens(netpolicy.Plan{Names: a.Names}.Opens(name), protoTCP, c.to.Port()):
		why = whyName
	case !a.Admits(name, c.to):
		why = whyAddress
	default:
		c.name = name
		return ""
	}
	s.refuseLocked(c.box, name, c.to, why)
	return why
}

const protoTCP = 6

// refuse tells a client of TLS why, and is gone soon, whatever it does.
func refuse(client *net.TCPConn, said []byte) {
	if len(said) == 0 || said[0] != 22 {
		return // it would not understand
	}
	_ = client.SetDeadline(time.Now().Add(500 * time.Millisecond))
	if _, err := client.Write([]byte{21, 3, 1, 0, 2, 2, 49}); err != nil { // fatal, access denied
		return
	}
	if client.CloseWrite() == nil {
		_, _ = io.Copy(io.Discard, client)
	}
}

func addrOf(a net.Addr) netip.Addr {
	t, ok := a.(*net.TCPAddr)
	if !ok {
		return netip.Addr{}
	}
	return t.AddrPort().Addr().Unmap()
}

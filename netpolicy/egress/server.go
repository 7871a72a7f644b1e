package egress

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/netpolicy"
)

// Limits. A sandbox has at most a part of the places, so that others have some.
const (
	handshakes    = 1024             // of all at once
	ownHandshakes = 128              // of one sandbox
	helloWithin   = 10 * time.Second // until it has said whom it asks for
	dialWithin    = 15 * time.Second
	ownPart       = 4               // of all places, one sandbox has at most one of so many
	halfWithin    = 2 * time.Minute // without a byte, when one side has ended
)

// Config of a Server; zero values are those of a process that is in the router.
type Config struct {
	Places   int // connections of all sandboxes at once; 0: as many as descriptors allow
	Log      *slog.Logger
	Listen   func(at netip.AddrPort) (net.Listener, error)
	Dial     func(ctx context.Context, to netip.AddrPort) (net.Conn, error)
	Original func(c *net.TCPConn) (netip.AddrPort, error) // whom it was meant for
	Inside   func(router *os.File) error                  // that Listen and Dial are in this network namespace
}

// Server is at work between New and Close.
type Server struct {
	c      Config
	ctx    context.Context
	cancel context.CancelFunc
	work   sync.WaitGroup
	slots  chan struct{} // handshakes
	web    *http.Server
	webs   chan net.Conn // for it

	mu       sync.Mutex
	table    table
	boxes    map[netip.Addr]*box
	byID     map[dsec.SandboxID]*box
	live     int // connections
	own      int // of one sandbox at most
	listener net.Listener
	watchers map[chan Refusal]bool
	open     map[io.Closer]bool // of the agent; nil: closed
}

// box is a sandbox that connects.
type box struct {
	addr    netip.Addr
	id      dsec.SandboxID
	conns   map[*conn]bool
	asking  int // of them, that have not yet said whom they ask for
	audit   audit
	refused int64
	told    *rate.Limiter
}

// New makes a server that lets nothing pass.
func New(c Config) *Server {
	c.defaults()
	s := &Server{c: c, slots: make(chan struct{}, handshakes), table: table{}, boxes: map[netip.Addr]*box{}, byID: map[dsec.SandboxID]*box{},
		watchers: map[chan Refusal]bool{}, open: map[io.Closer]bool{}}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.openWeb()
	return s
}

// Close ends all connections.
func (s *Server) Close() error {
	s.cancel()
	s.mu.Lock()
	var errs []error
	for c := range s.open {
		errs = append(errs, c.Close())
	}
	s.open = nil
	if s.listener != nil {
		errs = append(errs, s.listener.Close())
	}
	for _, b := range s.boxes {
		for c := range b.conns {
			c.killLocked()
		}
	}
	s.mu.Unlock()
	errs = append(errs, s.web.Close())
	s.work.Wait()
	return errors.Join(errs...)
}

// listen begins to take connections, once.
func (s *Server) listen(at netip.AddrPort, own int) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.own = max(1, min(own, s.c.Places/ownPart))
	if s.listener != nil || s.open == nil {
		return nil
	}
	l, err := s.c.Listen(at)
	if err != nil {
		return dsec.E(dsec.Internal, "listen for connections", at.String(), err)
	}
	s.listener = l
	s.work.Go(func() { s.accept(l) })
	return nil
}

func (s *Server) accept(l net.Listener) {
	for {
		c, err := l.Accept()
		if s.ctx.Err() != nil {
			if err == nil {
				_ = c.Close()
			}
			return
		}
		if err != nil {
			time.Sleep(10 * time.Millisecond) // out of descriptors
			continue
		}
		s.work.Go(func() { s.serve(c.(*net.TCPConn)) })
	}
}

// set puts what a sandbox may reach in force.
func (s *Server) set(a netpolicy.Admitted) {
	s.mu.Lock()
	b := s.boxes[a.Address]
	var dead []*conn
	if b == nil || b.id != a.Sandbox {
		dead = append(dead, s.forgetLocked(a.Address)...)
		b = &box{addr: a.Address, id: a.Sandbox, conns: map[*conn]bool{}, told: rate.NewLimiter(rate.Every(netpolicy.TellEvery), netpolicy.TellBurst), audit: audit{rows: map[key]*row{}}}
		if old := s.byID[a.Sandbox]; old != nil { // it was started again
			b.audit, b.refused = old.audit, old.refused
			dead = append(dead, s.forgetLocked(old.addr)...)
		}
		s.boxes[b.addr], s.byID[b.id] = b, b
	}
	s.table[a.Address] = &a
	for c := range b.conns {
		if c.name != "" && !a.Free && !a.Admits(c.name, c.to) {
			c.killLocked()
			dead = append(dead, c)
		}
	}
	s.mu.Unlock()
	await(dead)
}

// forget ends what has an address, or only one sandbox that has it.
func (s *Server) forget(sandbox netip.Addr, id dsec.SandboxID) {
	s.mu.Lock()
	var dead []*conn
	if b := s.boxes[sandbox]; id == "" || b != nil && b.id == id {
		dead = s.forgetLocked(sandbox)
	}
	s.mu.Unlock()
	await(dead)
}

func (s *Server) forgetLocked(sandbox netip.Addr) (dead []*conn) {
	delete(s.table, sandbox)
	b := s.boxes[sandbox]
	if b == nil {
		return nil
	}
	for c := range b.conns {
		c.killLocked()
		dead = append(dead, c)
	}
	delete(s.boxes, sandbox)
	if s.byID[b.id] == b {
		delete(s.byID, b.id)
	}
	return dead
}

// await returns when the connections have let go of their sockets: what was read
// of one is not written to the other any more.
func await(dead []*conn) {
	for _, c := range dead {
		<-c.done
	}
}

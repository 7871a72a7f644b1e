// Package dns answers the questions of sandboxes whose network is an allow-list:
// names that a rule opens and no others, and of those IPv4 addresses only. What it
// hands out it has had pinned first, so that the answer can be used at once, and
// nothing else that has the address is opened by it.
//
// A name that no rule opens is NXDOMAIN at once, and nobody is asked: data do not
// leave by questions. (Below a wildcard they can, to who has the domain.) A name
// that leads to what is closed has no address. Other types of records are empty:
// in particular AAAA, as IPv6 is closed, and HTTPS, which would hide names. Names of
// the node's mirror lead to it, where a policy opens that.
package dns

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/net/dns/dnsmessage"

	"github.com/opendsec/dsec/netpolicy"
)

const (
	atOnce    = 1024 // questions of all
	ownAtOnce = 64   // of one sandbox
	ownConns  = 16   // of one sandbox, by TCP
	within    = 5 * time.Second
	idle      = 10 * time.Second // of a TCP connection
	maxUDP    = 1232             // bytes of an answer, whatever the asker says he takes
	maxTTL    = time.Hour
	mirrorTTL = time.Minute // of a name that the node serves
)

// Asker is a sandbox that asks.
type Asker interface {
	// Opens is what is open of the addresses of a name; nothing: it may not be
	// asked for.
	Opens(name string) []netpolicy.Ports
	// MirrorAt is where a name leads that the node itself serves.
	MirrorAt(name string) (a netip.Addr, ok bool)
	// Free says that every name may be asked for: questions and answers are passed
	// on as they are.
	Free() bool
	// MayLeadTo says whether a name may have an address.
	MayLeadTo(a netip.Addr) bool
	// Pin opens addresses for a name that has them, as it is asked for now.
	Pin(name string, addrs []netip.Addr, ttl time.Duration) error
}

// Config of a Server.
type Config struct {
	Upstream []netip.AddrPort                    // asked in this order
	Asker    func(from netip.Addr) (Asker, bool) // whose address it is
	Node     func(f func() error) error          // runs f where the outside is reached
	Log      *slog.Logger
	// Refused is told a name that no rule opens to who has asked, as
	// often as netpolicy.TellBurst says, with how many of its questions were refused so far; nil: nobody is.
	Refused func(from netip.Addr, name string, questions int64)
}

// Server answers on sockets that it is given.
type Server struct {
	c      Config
	ctx    context.Context
	cancel context.CancelFunc
	work   sync.WaitGroup
	slots  chan struct{}

	mu    sync.Mutex
	own   map[netip.Addr]int // questions of each
	conns map[netip.Addr]int
	open  map[io.Closer]bool

	refused map[netip.Addr]*refusals
}

// Serve answers until Close. The server owns the sockets.
func Serve(c Config, udp net.PacketConn, tcp net.Listener) *Server {
	s := &Server{c: c, slots: make(chan struct{}, atOnce), own: map[netip.Addr]int{}, conns: map[netip.Addr]int{}, open: map[io.Closer]bool{udp: true, tcp: true}}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.work.Go(func() { s.serveUDP(udp) })
	s.work.Go(func() { s.serveTCP(tcp) })
	return s
}

// Close ends what is at work.
func (s *Server) Close() error {
	s.cancel()
	s.mu.Lock()
	var errs []error
	for c := range s.open {
		errs = append(errs, c.Close())
	}
	s.open = nil
	s.mu.Unlock()
	s.work.Wait()
	return errors.Join(errs...)
}

// begin takes a place for a question; without one it is not answered, and asked again.
func (s *Server) begin(from netip.Addr) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.own[from] >= ownAtOnce {
		return false
	}
	select {
	case s.slots <- struct{}{}:
		s.own[from]++
		return true
	default:
		return false
	}
}

func (s *Server) end(from netip.Addr) {
	<-s.slots
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.own[from]--; s.own[from] == 0 {
		delete(s.own, from)
	}
}

func (s *Server) serveUDP(c net.PacketConn) {
	buf := make([]byte, 4096)
	for {
		n, from, err := c.ReadFrom(buf)
		if s.ctx.Err() != nil {
			return
		}
		if err != nil {
			continue // of one datagram
		}
		addr := addrOf(from)
		if !s.begin(addr) {
			continue
		}
		question := append([]byte(nil), buf[:n]...)
		s.work.Go(func() {
			defer s.end(addr)
			if a := s.answer(addr, question, false); a != nil {
				_, _ = c.WriteTo(a, from)
			}
		})
	}
}

func (s *Server) serveTCP(l net.Listener) {
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
		addr := addrOf(c.RemoteAddr())
		if !s.enter(c, addr) {
			_ = c.Close()
			continue
		}
		s.work.Go(func() {
			defer s.leave(c, addr)
			s.converse(c, addr)
		})
	}
}

func (s *Server) enter(c net.Conn, from netip.Addr) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.open == nil || s.conns[from] >= ownConns {
		return false
	}
	s.open[c] = true
	s.conns[from]++
	return true
}

func (s *Server) leave(c net.Conn, from netip.Addr) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.conns[from]--; s.conns[from] == 0 {
		delete(s.conns, from)
	}
	if s.open != nil {
		delete(s.open, c)
		_ = c.Close()
	}
}

// converse answers one question after the other.
func (s *Server) converse(c net.Conn, from netip.Addr) {
	for {
		_ = c.SetDeadline(time.Now().Add(idle))
		question, err := readTCP(c)
		if err != nil || !s.begin(from) {
			return
		}
		a := s.answer(from, question, true)
		s.end(from)
		if a == nil || writeTCP(c, a) != nil {
			return
		}
	}
}

func readTCP(r io.Reader) ([]byte, error) {
	var size [2]byte
	if _, err := io.ReadFull(r, size[:]); err != nil {
		return nil, err
	}
	b := make([]byte, binary.BigEndian.Uint16(size[:]))
	_, err := io.ReadFull(r, b)
	return b, err
}

func writeTCP(w io.Writer, b []byte) error {
	_, err := w.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(b))), b...))
	return err
}

func addrOf(a net.Addr) netip.Addr {
	p, err := netip.ParseAddrPort(a.String())
	if err != nil {
		return netip.Addr{}
	}
	return p.Addr().Unmap()
}

// query is a question that was understood.
type query struct {
	header   dnsmessage.Header
	question dnsmessage.Question
	size     int // of an answer by UDP
}

// parse reads a question; ok is false for what is none, and is not answered.
func parse(b []byte) (q query, rcode dnsmessage.RCode, ok bool) {
	var p dnsmessage.Parser
	h, err := p.Start(b)
	if err != nil || h.Response {
		return q, 0, false
	}
	q.header, q.size = h, 512
	if h.OpCode != 0 {
		return q, dnsmessage.RCodeNotImplemented, true
	}
	if q.question, err = p.Question(); err != nil {
		return q, dnsmessage.RCodeFormatError, true
	}
	if _, err := p.Question(); !errors.Is(err, dnsmessage.ErrSectionDone) {
		return q, dnsmessage.RCodeFormatError, true
	}
	if p.SkipAllAnswers() != nil || p.SkipAllAuthorities() != nil {
		return q, dnsmessage.RCodeFormatError, true
	}
	for {
		r, err := p.AdditionalHeader()
		if err != nil {
			return q, dnsmessage.RCodeSuccess, true
		}
		if r.Type == dnsmessage.TypeOPT {
			q.size = max(q.size, min(int(r.Class), maxUDP))
		}
		if p.SkipAdditional() != nil {
			return q, dnsmessage.RCodeFormatError, true
		}
	}
}

// answer is nil for what is not answered.
func (s *Server) answer(from netip.Addr, b []byte, tcp bool) []byte {
	asker, known := s.c.Asker(from)
	q, rcode, ok := parse(b)
	if !known || !ok {
		return nil
	}
	if name, err := netpolicy.CanonicalName(q.question.Name.String()); err == nil && rcode == dnsmessage.RCodeSuccess && q.question.Class == dnsmessage.ClassINET {
		if a, ok := asker.MirrorAt(name); ok {
			return q.reply(rcode, only(q.question.Type, a), mirrorTTL, maxUDP)
		}
	}
	if rcode == dnsmessage.RCodeSuccess && asker.Free() {
		return s.pass(q, b, tcp)
	}
	var addrs []netip.Addr
	var ttl time.Duration
	if rcode == dnsmessage.RCodeSuccess {
		if rcode, addrs, ttl = s.resolve(asker, q.question); rcode == dnsmessage.RCodeNameError && !opened(asker, q.question) {
			s.refuse(from, q.question.Name.String())
		}
	}
	limit := q.size
	if tcp {
		limit = 1<<16 - 1
	}
	return q.reply(rcode, addrs, ttl, limit)
}

// only is an address as a record of a type; of others there are none.
func only(t dnsmessage.Type, a netip.Addr) []netip.Addr {
	if t == dnsmessage.TypeA && a.Is4() {
		return []netip.Addr{a}
	}
	return nil
}

// pass gives a question to upstream as it is, and what upstream says back.
func (s *Server) pass(q query, b []byte, tcp bool) []byte {
	network := "udp"
	if tcp {
		network = "tcp"
	}
	ctx, cancel := context.WithTimeout(s.ctx, within)
	defer cancel()
	for _, server := range s.c.Upstream {
		one, stop := context.WithTimeout(ctx, perServer)
		_, raw, err := s.exchange(one, network, server, b, q.header.ID)
		stop()
		if err == nil {
			return raw
		}
		s.c.Log.Warn("question of a sandbox not passed on", "server", server, "err", err)
	}
	return q.reply(dnsmessage.RCodeServerFailure, nil, 0, maxUDP)
}

// opened says whether a rule opens the name of a question.
func opened(asker Asker, q dnsmessage.Question) bool {
	name, err := netpolicy.CanonicalName(q.Name.String())
	return err == nil && q.Class == dnsmessage.ClassINET && len(asker.Opens(name)) > 0
}

// resolve asks upstream what a name that may be asked for is, and pins it.
func (s *Server) resolve(asker Asker, q dnsmessage.Question) (dnsmessage.RCode, []netip.Addr, time.Duration) {
	if !opened(asker, q) {
		return dnsmessage.RCodeNameError, nil, 0
	}
	name, err := netpolicy.CanonicalName(q.Name.String())
	if err != nil {
		return dnsmessage.RCodeNameError, nil, 0
	}
	if q.Type != dnsmessage.TypeA {
		return dnsmessage.RCodeSuccess, nil, 0
	}
	ctx, cancel := context.WithTimeout(s.ctx, within)
	defer cancel()
	got, err := s.lookUp(ctx, name)
	if err != nil {
		s.c.Log.Warn("question of a sandbox not answered", "name", name, "err", err)
		return dnsmessage.RCodeServerFailure, nil, 0
	}
	var addrs []netip.Addr
	for _, a := range got.addrs {
		if asker.MayLeadTo(a) {
			addrs = append(addrs, a)
		}
	}
	if len(addrs) > 0 {
		if err := asker.Pin(name, addrs, got.ttl); err != nil {
			s.c.Log.Error("answer not pinned", "name", name, "err", err)
			return dnsmessage.RCodeServerFailure, nil, 0
		}
	}
	return got.rcode, addrs, got.ttl
}

// reply builds an answer; one that does not fit says so.
func (q query) reply(rcode dnsmessage.RCode, addrs []netip.Addr, ttl time.Duration, limit int) []byte {
	h := dnsmessage.Header{ID: q.header.ID, Response: true, RecursionDesired: q.header.RecursionDesired, RecursionAvailable: true, RCode: rcode}
	m := dnsmessage.Message{Header: h}
	if q.question.Name.Length > 0 {
		m.Questions = []dnsmessage.Question{q.question}
	}
	for _, a := range addrs {
		m.Answers = append(m.Answers, dnsmessage.Resource{
			Header: dnsmessage.ResourceHeader{Name: q.question.Name, Class: dnsmessage.ClassINET, TTL: uint32(ttl / time.Second)},
			Body:   &dnsmessage.AResource{A: a.As4()}})
	}
	b, err := m.Pack()
	if err != nil {
		return nil
	}
	if len(b) > limit {
		m.Answers, m.Truncated = nil, true
		if b, err = m.Pack(); err != nil {
			return nil
		}
	}
	return b
}

package dns

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"time"

	"golang.org/x/net/dns/dnsmessage"
)

const (
	maxAddrs  = 64 // of one name
	maxChain  = 16 // names that lead to one another
	perServer = 2 * time.Second
)

// found is what a name has.
type found struct {
	rcode dnsmessage.RCode
	addrs []netip.Addr
	ttl   time.Duration // the shortest of what led there
}

// lookUp asks one server after the other until one knows.
func (s *Server) lookUp(ctx context.Context, name string) (f found, err error) {
	if len(s.c.Upstream) == 0 {
		return f, errors.New("this node has no name servers: set node.nameservers")
	}
	var errs []error
	for _, server := range s.c.Upstream {
		f, err := s.ask(ctx, server, name)
		if err == nil {
			return f, nil
		}
		errs = append(errs, fmt.Errorf("ask %s: %w", server, err))
	}
	return f, errors.Join(errs...)
}

// ask asks by UDP, and again by TCP for what does not fit.
func (s *Server) ask(ctx context.Context, server netip.AddrPort, name string) (f found, err error) {
	ctx, cancel := context.WithTimeout(ctx, perServer)
	defer cancel()
	var seed [2]byte
	if _, err := rand.Read(seed[:]); err != nil {
		return f, err
	}
	id := binary.BigEndian.Uint16(seed[:])
	q, err := question(id, name)
	if err != nil {
		return f, err
	}
	m, _, err := s.exchange(ctx, "udp", server, q, id)
	if err == nil && m.Truncated {
		m, _, err = s.exchange(ctx, "tcp", server, q, id)
	}
	if err != nil {
		return f, err
	}
	return read(m, name)
}

func question(id uint16, name string) ([]byte, error) {
	n, err := dnsmessage.NewName(name + ".")
	if err != nil {
		return nil, err
	}
	opt := dnsmessage.ResourceHeader{}
	if err := opt.SetEDNS0(maxUDP, dnsmessage.RCodeSuccess, false); err != nil {
		return nil, err
	}
	m := dnsmessage.Message{
		Header:      dnsmessage.Header{ID: id, RecursionDesired: true},
		Questions:   []dnsmessage.Question{{Name: n, Type: dnsmessage.TypeA, Class: dnsmessage.ClassINET}},
		Additionals: []dnsmessage.Resource{{Header: opt, Body: &dnsmessage.OPTResource{}}},
	}
	return m.Pack()
}

// exchange sends a question and waits for its answer; what is another's is not
// looked at. Each question has a socket of its own, with a port of the kernel's choice.
func (s *Server) exchange(ctx context.Context, network string, server netip.AddrPort, q []byte, id uint16) (m dnsmessage.Message, raw []byte, err error) {
	var c net.Conn
	if err := s.c.Node(func() (err error) { c, err = (&net.Dialer{}).DialContext(ctx, network, server.String()); return err }); err != nil {
		return m, nil, err
	}
	defer func() { _ = c.Close() }()
	if end, ok := ctx.Deadline(); ok {
		_ = c.SetDeadline(end)
	}
	stop := context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if network == "tcp" {
		if err := writeTCP(c, q); err != nil {
			return m, nil, err
		}
		if raw, err = readTCP(c); err != nil {
			return m, nil, err
		}
		return m, raw, isAnswer(&m, raw, q, id)
	}
	if _, err := c.Write(q); err != nil {
		return m, nil, err
	}
	buf := make([]byte, 1<<16)
	for {
		n, err := c.Read(buf)
		if err != nil {
			return m, nil, err
		}
		if isAnswer(&m, buf[:n], q, id) == nil {
			return m, buf[:n], nil
		}
	}
}

// isAnswer reads b into m if it answers q.
func isAnswer(m *dnsmessage.Message, b, q []byte, id uint16) error {
	var asked dnsmessage.Message
	if err := errors.Join(asked.Unpack(q), m.Unpack(b)); err != nil {
		return err
	}
	if m.ID != id || !m.Response || len(m.Questions) != 1 || m.Questions[0].Type != asked.Questions[0].Type ||
		!strings.EqualFold(m.Questions[0].Name.String(), asked.Questions[0].Name.String()) {
		return errors.New("an answer to something else")
	}
	return nil
}

// read follows names from the one that was asked for to its addresses. Records that
// are not on that way count for nothing.
func read(m dnsmessage.Message, name string) (f found, err error) {
	f.rcode, f.ttl = m.RCode, maxTTL
	if m.RCode == dnsmessage.RCodeNameError {
		return f, nil
	}
	if m.RCode != dnsmessage.RCodeSuccess {
		return f, fmt.Errorf("answer %s", m.RCode)
	}
	at := strings.ToLower(name) + "."
	for range maxChain {
		next := ""
		for _, r := range m.Answers {
			if !strings.EqualFold(r.Header.Name.String(), at) || r.Header.Class != dnsmessage.ClassINET {
				continue
			}
			switch body := r.Body.(type) {
			case *dnsmessage.AResource:
				if len(f.addrs) < maxAddrs {
					f.addrs = append(f.addrs, netip.AddrFrom4(body.A))
				}
			case *dnsmessage.CNAMEResource:
				next = strings.ToLower(body.CNAME.String())
			default:
				continue
			}
			f.ttl = min(f.ttl, time.Duration(r.Header.TTL)*time.Second)
		}
		if len(f.addrs) > 0 || next == "" {
			return f, nil
		}
		at = next
	}
	return f, fmt.Errorf("more than %d names lead to one another", maxChain)
}

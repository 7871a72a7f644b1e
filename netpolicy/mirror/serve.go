package mirror

import (
	"errors"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"time"
)

// connsPerSandbox of one at once; more are closed.
const connsPerSandbox = 128

// Server serves a mirror on listeners, with bounds on what a sandbox may take:
// connections, headers, and time.
func Server(m *Mirror) *http.Server {
	return &http.Server{Handler: m, ReadHeaderTimeout: 10 * time.Second, ReadTimeout: 30 * time.Second, WriteTimeout: maxFileTime,
		IdleTimeout: time.Minute, MaxHeaderBytes: 16 << 10}
}

// Listen bounds the connections of each sandbox on a listener.
func Listen(l net.Listener) net.Listener {
	return &bounded{Listener: l, conns: map[netip.Addr]int{}}
}

type bounded struct {
	net.Listener
	mu    sync.Mutex
	conns map[netip.Addr]int
}

// Accept implements net.Listener.
func (b *bounded) Accept() (net.Conn, error) {
	for {
		c, err := b.Listener.Accept()
		if err != nil {
			return nil, err
		}
		at, err := netip.ParseAddrPort(c.RemoteAddr().String())
		if err != nil {
			return nil, errors.Join(err, c.Close())
		}
		from := at.Addr().Unmap()
		b.mu.Lock()
		full := b.conns[from] >= connsPerSandbox
		if !full {
			b.conns[from]++
		}
		b.mu.Unlock()
		if full {
			_ = c.Close()
			continue
		}
		return &counted{Conn: c, gone: sync.OnceFunc(func() { b.leave(from) })}, nil
	}
}

func (b *bounded) leave(from netip.Addr) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.conns[from]--; b.conns[from] == 0 {
		delete(b.conns, from)
	}
}

type counted struct {
	net.Conn
	gone func()
}

// Close implements net.Conn.
func (c *counted) Close() error {
	c.gone()
	return c.Conn.Close()
}

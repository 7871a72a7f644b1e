package wire

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/opendsec/dsec"
)

// Upgrade sends an upgrade request over conn and returns the byte stream it
// becomes. On an error the caller closes conn.
func Upgrade(conn net.Conn, req *http.Request) (net.Conn, error) {
	req.Header.Set("Connection", "Upgrade")
	req.Header.Set("Upgrade", TunnelProtocol)
	if err := req.Write(conn); err != nil {
		return nil, err
	}
	br := bufio.NewReader(conn)
	resp, err := http.ReadResponse(br, req)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusSwitchingProtocols {
		defer resp.Body.Close()
		b, _ := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
		return nil, HTTPError("open tunnel", resp.StatusCode, b)
	}
	return &bufferedConn{Conn: conn, r: br}, nil
}

// Accept answers an upgrade request and returns its connection.
func Accept(w http.ResponseWriter) (net.Conn, error) {
	conn, rw, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return nil, dsec.E(dsec.Internal, "accept tunnel", "", err)
	}
	_ = conn.SetDeadline(time.Time{})
	_, err = fmt.Fprintf(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: %s\r\n\r\n", TunnelProtocol)
	if err != nil {
		_ = conn.Close()
		return nil, dsec.E(dsec.Canceled, "accept tunnel", "", err)
	}
	return &bufferedConn{Conn: conn, r: rw.Reader}, nil
}

// bufferedConn reads first what was read ahead.
type bufferedConn struct {
	net.Conn
	r *bufio.Reader
}

func (c *bufferedConn) Read(p []byte) (int, error) { return c.r.Read(p) }

// CloseWrite tells the other end that nothing more comes.
func (c *bufferedConn) CloseWrite() error { return closeWrite(c.Conn) }

func closeWrite(c net.Conn) error {
	if h, ok := c.(interface{ CloseWrite() error }); ok {
		return h.CloseWrite()
	}
	return c.Close()
}

// Splice copies both ways until both directions have ended, or one failed,
// and closes both ends. A half close is passed on.
func Splice(a, b net.Conn) {
	var wg sync.WaitGroup
	wg.Add(2)
	one := func(dst, src net.Conn) {
		defer wg.Done()
		if _, err := io.Copy(dst, src); err != nil || closeWrite(dst) != nil {
			_ = dst.Close()
			_ = src.Close()
		}
	}
	go one(a, b)
	go one(b, a)
	wg.Wait()
	_ = a.Close()
	_ = b.Close()
}

package files

import (
	"context"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	helperIdle  = 5 * time.Second // without a request, before the helper ends
	helperGrace = 2 * time.Second // for what a lost client left running
)

// Main is the helper process: it serves the root of its mount namespace as the
// user it runs as, until nothing was asked for some seconds or the other end is
// closed. A call that the kernel does not let go of does not keep the process.
func Main(conn net.Conn) error { return MainIn(conn, "/") }

// MainIn is Main for a root that is not the process's own.
func MainIn(conn net.Conn, root string) error {
	unix.Umask(0) // modes are what was asked for
	l, err := NewLocal(root)
	if err != nil {
		_ = conn.Close()
		return err
	}
	defer l.Close()
	return Serve(context.Background(), &mortal{Conn: conn}, l, helperIdle)
}

// mortal ends the process some time after its connection.
type mortal struct {
	net.Conn
	once sync.Once
}

func (m *mortal) Read(p []byte) (int, error) {
	n, err := m.Conn.Read(p)
	if err != nil {
		m.end()
	}
	return n, err
}

func (m *mortal) Close() error {
	m.end()
	return m.Conn.Close()
}

func (m *mortal) end() {
	m.once.Do(func() { time.AfterFunc(helperGrace, func() { os.Exit(1) }) })
}

// SetWriteBuffer hands on what a link asks of a socket.
func (m *mortal) SetWriteBuffer(n int) error {
	if c, ok := m.Conn.(*net.UnixConn); ok {
		return c.SetWriteBuffer(n)
	}
	return nil
}

package files

import (
	"context"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	helperIdle  = 10 * time.Second // without a request, before the helper ends
	helperGrace = 2 * time.Second  // for what a lost client left running
)

// Main is the helper process: it serves the root of its mount namespace as the
// user it runs as, over the connected unix socket fd, until nothing was asked
// for some seconds or the other end is closed. A call that the kernel does not
// let go of does not keep the process.
func Main(fd int) error {
	unix.Umask(0) // modes are what was asked for
	f := os.NewFile(uintptr(fd), "agent")
	conn, err := net.FileConn(f)
	f.Close()
	if err != nil {
		return fail("serve files", "", err)
	}
	l, err := NewLocal("/")
	if err != nil {
		conn.Close()
		return err
	}
	defer l.Close()
	return Serve(context.Background(), &mortal{conn: conn}, l, helperIdle)
}

// mortal ends the process some time after its connection.
type mortal struct {
	conn net.Conn
	once sync.Once
}

func (m *mortal) Read(p []byte) (int, error) {
	n, err := m.conn.Read(p)
	if err != nil {
		m.end()
	}
	return n, err
}

func (m *mortal) Write(p []byte) (int, error) { return m.conn.Write(p) }

func (m *mortal) Close() error {
	m.end()
	return m.conn.Close()
}

func (m *mortal) end() {
	m.once.Do(func() { time.AfterFunc(helperGrace, func() { os.Exit(1) }) })
}

var _ io.ReadWriteCloser = (*mortal)(nil)

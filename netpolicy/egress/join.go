package egress

import (
	"io"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/within"
)

// buffers are lent to connections while they have something to say: those that are
// silent take none.
var buffers = sync.Pool{New: func() any { return new([32 << 10]byte) }}

// join passes on what both say until both have ended, or one has failed.
func (c *conn) join(server *net.TCPConn, r *row) {
	client := c.client
	var half atomic.Bool
	var wg sync.WaitGroup
	one := func(to, from *net.TCPConn, n *atomic.Int64) {
		err := pass(to, from, func(bytes int) {
			n.Add(int64(bytes))
			r.used()
			if half.Load() {
				_ = from.SetReadDeadline(time.Now().Add(halfWithin))
			}
		})
		if err == nil && to.CloseWrite() == nil {
			half.Store(true)
			_ = to.SetReadDeadline(time.Now().Add(halfWithin))
			return
		}
		reset(client)
		reset(server)
	}
	wg.Go(func() { one(server, client, &r.out) })
	one(client, server, &r.in)
	wg.Wait()
	for _, t := range []*net.TCPConn{client, server} {
		c.sent(t)
		_ = t.Close()
	}
}

// sent waits until the other end has all that was written: what a closed socket
// still sends no change of a policy could stop.
func (c *conn) sent(t *net.TCPConn) {
	raw, err := t.SyscallConn()
	if err != nil {
		return
	}
	end := time.Now().Add(halfWithin)
	for wait := 100 * time.Microsecond; time.Now().Before(end); wait = min(2*wait, 50*time.Millisecond) {
		waiting := 0
		if raw.Control(func(fd uintptr) { waiting, _ = unix.IoctlGetInt(int(fd), unix.SIOCOUTQ) }) != nil || waiting == 0 || within.Sleep(c.ctx, wait) != nil {
			return
		}
	}
}

// pass copies until the end of from, which is no error.
func pass(to io.Writer, from *net.TCPConn, passed func(bytes int)) error {
	raw, err := from.SyscallConn()
	if err != nil {
		return err
	}
	for {
		b, n, err := receive(raw)
		if n > 0 {
			_, err = to.Write(b[:n])
			passed(n)
		}
		if b != nil {
			buffers.Put(b)
		}
		if err != nil || n == 0 {
			return err
		}
	}
}

// receive waits for something, and takes a buffer only then. Without bytes and an
// error it is the end.
func receive(raw syscall.RawConn) (b *[32 << 10]byte, n int, err error) {
	waited := raw.Read(func(fd uintptr) bool {
		b = buffers.Get().(*[32 << 10]byte)
		for {
			n, err = unix.Read(int(fd), b[:])
			if err != unix.EINTR {
				break
			}
		}
		if err == unix.EAGAIN {
			buffers.Put(b)
			b = nil
			return false
		}
		return true
	})
	if waited != nil {
		return nil, 0, waited
	}
	return b, max(n, 0), err
}

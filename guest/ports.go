package guest

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"strconv"
	"sync"
	"time"

	"github.com/opendsec/dsec/files"
)

// stdinAnswer is how long a guest may take to say how much of what was given up
// it has written.
const stdinAnswer = time.Second

// afterwards is a context that ends some time after ctx.
func afterwards(ctx context.Context) (context.Context, context.CancelFunc) {
	late, cancel := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, func() { time.AfterFunc(stdinAnswer, cancel) })
	return late, func() { stop(); cancel() }
}

// Files opens the file service as a user of the sandbox.
func (c *Client) Files(ctx context.Context, user string) (*files.Redialing, error) {
	dial := func(ctx context.Context) (io.ReadWriteCloser, error) {
		s, _, err := c.begin(ctx, bulkWindow, Request{Op: OpFiles, User: user})
		if err != nil {
			return nil, err
		}
		return s, nil
	}
	fs := files.NewRedialing(dial)
	if _, err := fs.Stat(ctx, "/", true); err != nil { // who does not exist is an error now
		_ = fs.Close()
		return nil, err
	}
	return fs, nil
}

// Dial connects to a port of the sandbox's loopback.
func (c *Client) Dial(ctx context.Context, port uint16) (net.Conn, error) {
	s, _, err := c.begin(ctx, bulkWindow, Request{Op: OpDial, Port: port})
	if err != nil {
		return nil, err
	}
	return &conn{Stream: s, port: port}, nil
}

// conn is a Stream with deadlines.
type conn struct {
	*Stream
	port    uint16
	in, out deadline
}

// deadline ends a context when it passes.
type deadline struct {
	mu  sync.Mutex
	at  time.Time
	set chan struct{} // closed when at changes
}

func (d *deadline) change(t time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.at = t
	if d.set != nil {
		close(d.set)
		d.set = nil
	}
}

// run calls f with a context of the deadline, again if that was changed.
func (d *deadline) run(f func(ctx context.Context) (int, error)) (int, error) {
	for total := 0; ; {
		d.mu.Lock()
		if d.set == nil {
			d.set = make(chan struct{})
		}
		at, set := d.at, d.set
		d.mu.Unlock()
		ctx, cancel := context.WithCancel(context.Background())
		if !at.IsZero() {
			ctx, cancel = context.WithDeadline(ctx, at)
		}
		watched := make(chan struct{})
		go func() {
			select {
			case <-set:
				cancel()
			case <-watched:
			}
		}()
		n, err := f(ctx)
		close(watched)
		cancel()
		total += n
		switch {
		case errors.Is(err, context.Canceled):
			continue
		case errors.Is(err, context.DeadlineExceeded):
			err = os.ErrDeadlineExceeded
		}
		return total, err
	}
}

func (c *conn) Read(p []byte) (int, error) {
	return c.in.run(func(ctx context.Context) (int, error) {
		if err := ctx.Err(); err != nil {
			return 0, err
		}
		return c.ReadContext(ctx, p)
	})
}

func (c *conn) Write(p []byte) (int, error) {
	return c.out.run(func(ctx context.Context) (int, error) {
		n, err := c.WriteContext(ctx, p)
		p = p[n:]
		return n, err
	})
}

func (c *conn) SetDeadline(t time.Time) error {
	c.in.change(t)
	c.out.change(t)
	return nil
}

func (c *conn) SetReadDeadline(t time.Time) error {
	c.in.change(t)
	return nil
}

func (c *conn) SetWriteDeadline(t time.Time) error {
	c.out.change(t)
	return nil
}

type address string

func (a address) Network() string { return "guest" }
func (a address) String() string  { return string(a) }

func (c *conn) LocalAddr() net.Addr  { return address("host") }
func (c *conn) RemoteAddr() net.Addr { return address("port " + strconv.Itoa(int(c.port))) }

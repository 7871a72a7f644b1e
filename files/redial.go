package files

import (
	"context"
	"errors"
	"io"
	"sync"

	"github.com/opendsec/dsec"
)

// Redialing is a file service whose other end comes and goes: it is dialed
// when it is needed and again after it went idle. A call that the old end
// certainly did not begin is made once more on a new one.
type Redialing struct {
	dial func(ctx context.Context) (io.ReadWriteCloser, error)

	mu      sync.Mutex
	client  *Client       // nil before the first call
	dialing chan struct{} // closed when the dial under way is over; nil if there is none
	closed  bool
}

var (
	_ FS      = (*Redialing)(nil)
	_ Watcher = (*Redialing)(nil)
)

// NewRedialing connects with dial. Close ends the connection.
func NewRedialing(dial func(ctx context.Context) (io.ReadWriteCloser, error)) *Redialing {
	return &Redialing{dial: dial}
}

// Close ends the connection; later calls fail.
func (r *Redialing) Close() error {
	r.mu.Lock()
	c := r.client
	r.client, r.closed = nil, true
	r.mu.Unlock()
	if c == nil {
		return nil
	}
	return c.Close()
}

// Idle reports whether no connection is open.
func (r *Redialing) Idle() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.client == nil || r.client.ended()
}

// live returns a client whose connection was alive a moment ago. One caller
// dials, the others wait for it.
func (r *Redialing) live(ctx context.Context) (*Client, error) {
	for {
		r.mu.Lock()
		if r.closed {
			r.mu.Unlock()
			return nil, dsec.Errorf(dsec.Unavailable, "open files", "", "closed")
		}
		if r.client != nil && !r.client.ended() {
			defer r.mu.Unlock()
			return r.client, nil
		}
		if wait := r.dialing; wait != nil {
			r.mu.Unlock()
			select {
			case <-wait:
			case <-ctx.Done():
				return nil, fail("open files", "", ctx.Err())
			}
			continue
		}
		old, done := r.client, make(chan struct{})
		r.client, r.dialing = nil, done
		r.mu.Unlock()
		return r.connect(ctx, old, done)
	}
}

func (r *Redialing) connect(ctx context.Context, old *Client, done chan struct{}) (*Client, error) {
	if old != nil {
		_ = old.Close()
	}
	conn, err := r.dial(ctx)
	r.mu.Lock()
	defer r.mu.Unlock()
	defer close(done)
	r.dialing = nil
	if err != nil {
		return nil, err
	}
	c := NewClient(conn)
	if r.closed {
		_ = c.Close()
		return nil, dsec.Errorf(dsec.Unavailable, "open files", "", "closed")
	}
	r.client = c
	return c, nil
}

// mostDials is more than chance explains: a server lives for seconds, and each
// of these calls would have to meet one in its last instant.
const mostDials = 10

// with runs fn on a live client, again if the first one was about to leave.
func (r *Redialing) with(ctx context.Context, fn func(*Client) error) error {
	for tries := 0; ; tries++ {
		c, err := r.live(ctx)
		if err != nil {
			return err
		}
		if err = fn(c); tries == mostDials || !errors.Is(err, errNotBegun) {
			return err
		}
	}
}

// Stat implements FS.
func (r *Redialing) Stat(ctx context.Context, path string, follow bool) (i Info, err error) {
	err = r.with(ctx, func(c *Client) error { i, err = c.Stat(ctx, path, follow); return err })
	return i, err
}

// List implements FS.
func (r *Redialing) List(ctx context.Context, path string, depth int) (all []Info, err error) {
	err = r.with(ctx, func(c *Client) error { all, err = c.List(ctx, path, depth); return err })
	return all, err
}

// Read implements FS.
func (r *Redialing) Read(ctx context.Context, path string, offset, length int64, w io.Writer) (n int64, err error) {
	err = r.with(ctx, func(c *Client) error { n, err = c.Read(ctx, path, offset, length, w); return err })
	return n, err
}

// Write implements FS.
func (r *Redialing) Write(ctx context.Context, path string, body io.Reader, o WriteOptions) (i Info, err error) {
	err = r.with(ctx, func(c *Client) error { i, err = c.Write(ctx, path, body, o); return err })
	return i, err
}

// Mkdir implements FS.
func (r *Redialing) Mkdir(ctx context.Context, path string, mode uint32, parents bool) error {
	return r.with(ctx, func(c *Client) error { return c.Mkdir(ctx, path, mode, parents) })
}

// Move implements FS.
func (r *Redialing) Move(ctx context.Context, from, to string) error {
	return r.with(ctx, func(c *Client) error { return c.Move(ctx, from, to) })
}

// Remove implements FS.
func (r *Redialing) Remove(ctx context.Context, path string, recursive bool) error {
	return r.with(ctx, func(c *Client) error { return c.Remove(ctx, path, recursive) })
}

// SetAttr implements FS.
func (r *Redialing) SetAttr(ctx context.Context, path string, a Attr) error {
	return r.with(ctx, func(c *Client) error { return c.SetAttr(ctx, path, a) })
}

// Download implements FS.
func (r *Redialing) Download(ctx context.Context, dir string, w io.Writer, o TreeOptions) error {
	return r.with(ctx, func(c *Client) error { return c.Download(ctx, dir, w, o) })
}

// Upload implements FS.
func (r *Redialing) Upload(ctx context.Context, dir string, body io.Reader, o TreeOptions) error {
	return r.with(ctx, func(c *Client) error { return c.Upload(ctx, dir, body, o) })
}

// Watch implements Watcher.
func (r *Redialing) Watch(ctx context.Context, dir string, recursive bool, fn func(Change) error) error {
	return r.with(ctx, func(c *Client) error { return c.Watch(ctx, dir, recursive, fn) })
}

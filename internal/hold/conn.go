package hold

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/opendsec/dsec"
)

var (
	errHoldGone  = errors.New("the hold is gone")
	aLongTimeAgo = time.Unix(1, 0)
	never        time.Time
)

// Client is the one client of a hold.
type Client struct {
	info   Info
	w      *wire
	events chan Event
	done   chan struct{}
	wg     sync.WaitGroup
	ends   ends
	plains plainEnds

	mu      sync.Mutex
	next    uint64
	waiting map[uint64]chan frame
	closed  bool
	backlog []Event
	routes  []*route
	more    chan struct{} // capacity 1
}

func dialOnce(ctx context.Context, socket string) (*Client, error) {
	var d net.Dialer
	nc, err := d.DialContext(ctx, "unixpacket", socket)
	if err != nil {
		return nil, dsec.E(dsec.Unavailable, "dial hold", socket, err)
	}
	c := &Client{w: newWire(nc.(*net.UnixConn)), events: make(chan Event), done: make(chan struct{}),
		waiting: map[uint64]chan frame{}, more: make(chan struct{}, 1), ends: ends{m: map[string]map[string]*awaited{}}}
	c.wg.Go(c.receive)
	c.wg.Go(c.deliver)
	var h wireHello
	if err := c.call(ctx, opHello, nil, nil, &h); err != nil {
		_ = c.Close()
		return nil, err
	}
	c.info = Info{Protocol: h.Protocol, Version: h.Version, PID: h.PID, Started: h.Started, Digest: h.Digest}
	return c, nil
}

// Info says what is at the other end.
func (c *Client) Info() Info { return c.info }

// Done is closed when the connection is lost: every call fails Unavailable.
func (c *Client) Done() <-chan struct{} { return c.done }

// Events returns the channel of ends: those not acknowledged before come
// first. It is closed when the connection is lost. One receiver.
func (c *Client) Events() <-chan Event { return c.events }

// route is where the ends of some sandboxes go instead.
type route struct {
	prefix string
	events chan Event
	left   chan struct{} // closed when nobody receives any more
}

// Route returns a channel of its own for the ends of sandboxes whose ids begin with
// the prefix, which Events has no more, until leave is called; the next client hears of
// those that come after it. It is not closed, see Done. One that came before is known
// from List.
func (c *Client) Route(prefix string) (events <-chan Event, leave func()) {
	r := &route{prefix: prefix, events: make(chan Event), left: make(chan struct{})}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.routes = append(c.routes, r)
	return r.events, sync.OnceFunc(func() { close(r.left) })
}

// routeOf is where an end is sent.
func (c *Client) routeOf(e Event) *route {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, r := range slices.Backward(c.routes) { // the last one who asked
		if e.Sandbox != "" && strings.HasPrefix(e.Sandbox, r.prefix) {
			return r
		}
	}
	return &route{events: c.events}
}

// Close leaves the hold, which goes on.
func (c *Client) Close() error {
	err := c.w.c.Close()
	c.wg.Wait()
	if errors.Is(err, net.ErrClosed) {
		return nil // the hold hung up first
	}
	return err
}

func (c *Client) receive() {
	for {
		f, err := c.w.recv()
		if err != nil {
			break
		}
		if f.op == opEvent {
			var e wireEvent
			switch err := json.Unmarshal(f.body, &e); {
			case err != nil:
			case e.Type == PlainExited:
				c.plains.ended(e.Event)
			default:
				if e.Type == ExecExited {
					c.ends.ended(execName{e.Sandbox, e.Exec}, e.Result, e.Kept)
				}
				c.mu.Lock()
				c.backlog = append(c.backlog, e.Event)
				c.mu.Unlock()
				select {
				case c.more <- struct{}{}:
				default:
				}
			}
			f.close()
			continue
		}
		c.mu.Lock()
		ch := c.waiting[f.id]
		delete(c.waiting, f.id)
		c.mu.Unlock()
		if ch == nil {
			f.close()
			continue
		}
		ch <- f
	}
	c.mu.Lock()
	c.closed = true
	for _, ch := range c.waiting {
		close(ch)
	}
	c.waiting = nil
	c.mu.Unlock()
	_ = c.w.c.Close()
	close(c.done)
}

// deliver hands events on without holding up replies.
func (c *Client) deliver() {
	defer close(c.events)
	for {
		c.mu.Lock()
		list := c.backlog
		c.backlog = nil
		c.mu.Unlock()
		for _, e := range list {
			to := c.routeOf(e)
			select {
			case to.events <- e:
			case <-to.left:
			case <-c.done:
				return
			}
		}
		select {
		case <-c.more:
		case <-c.done:
			return
		}
	}
}

// begin sends a request; its reply comes on the channel, which is closed if the
// connection is lost.
func (c *Client) begin(o op, body any, files []*os.File) (<-chan frame, uint64, error) {
	b, err := encodeBody(body)
	if err != nil {
		return nil, 0, dsec.E(dsec.Invalid, "encode request", "", err)
	}
	ch := make(chan frame, 1)
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return nil, 0, dsec.E(dsec.Unavailable, "call hold", "", errHoldGone)
	}
	c.next++
	id := c.next
	c.waiting[id] = ch
	c.mu.Unlock()
	if err := c.w.send(frame{op: o, id: id, body: b, files: files}); err != nil {
		c.mu.Lock()
		delete(c.waiting, id)
		c.mu.Unlock()
		return nil, 0, dsec.E(dsec.Unavailable, "call hold", "", err)
	}
	return ch, id, nil
}

func encodeBody(body any) ([]byte, error) {
	if e, ok := body.(*ExecSpec); ok {
		return encodeExec(e)
	}
	return json.Marshal(body)
}

// tell sends a request that is not answered. Those of one client are served in
// the order they were sent, before every request sent later.
func (c *Client) tell(ctx context.Context, o op, body any) error {
	if err := ctx.Err(); err != nil {
		return dsec.E(dsec.ClassOf(err), "call hold", "", err)
	}
	b, err := json.Marshal(body)
	if err == nil {
		err = c.w.send(frame{op: o, body: b})
	}
	if err != nil {
		return dsec.E(dsec.Unavailable, "call hold", "", err)
	}
	return nil
}

// finish reads a reply into out and returns its descriptors.
func finish(f frame, ok bool, out any) ([]*os.File, error) {
	if !ok {
		return nil, dsec.E(dsec.Unavailable, "call hold", "", errHoldGone)
	}
	if f.flags&flagError != 0 {
		f.close()
		return nil, decodeError(f.body)
	}
	if out != nil {
		if err := json.Unmarshal(f.body, out); err != nil {
			f.close()
			return nil, dsec.E(dsec.Internal, "read reply of hold", "", err)
		}
	}
	return f.files, nil
}

// request sends a request and waits. When ctx ends first, undo is called with
// what the reply would have brought, should it come; it may be nil.
func (c *Client) request(ctx context.Context, o op, body any, files []*os.File, undo func(frame)) (frame, bool, error) {
	if err := ctx.Err(); err != nil {
		return frame{}, false, dsec.E(dsec.ClassOf(err), "call hold", "", err)
	}
	ch, id, err := c.begin(o, body, files)
	if err != nil {
		return frame{}, false, err
	}
	select {
	case f, ok := <-ch:
		return f, ok, nil
	case <-ctx.Done():
	}
	if undo == nil {
		c.mu.Lock()
		delete(c.waiting, id)
		c.mu.Unlock()
		select {
		case f := <-ch: // it came in the meantime
			f.close()
		default:
		}
	} else {
		c.wg.Go(func() {
			if f, ok := <-ch; ok {
				if f.flags&flagError == 0 {
					undo(f)
				}
				f.close()
			}
		})
	}
	return frame{}, false, dsec.E(dsec.ClassOf(ctx.Err()), "call hold", "", ctx.Err())
}

// call is a request whose reply brings no descriptors.
func (c *Client) call(ctx context.Context, o op, body any, files []*os.File, out any) error {
	f, ok, err := c.request(ctx, o, body, files, nil)
	if err != nil {
		return err
	}
	got, err := finish(f, ok, out)
	closeAll(got)
	return err
}

// callFiles is a request whose reply brings n descriptors.
func (c *Client) callFiles(ctx context.Context, o op, body any, out any, n int) ([]*os.File, error) {
	f, ok, err := c.request(ctx, o, body, nil, nil)
	if err != nil {
		return nil, err
	}
	return wantFiles(f, ok, out, n)
}

func wantFiles(f frame, ok bool, out any, n int) ([]*os.File, error) {
	got, err := finish(f, ok, out)
	if err == nil && len(got) != n {
		closeAll(got)
		return nil, dsec.Errorf(dsec.Internal, "read reply of hold", "", "%d descriptors, want %d", len(got), n)
	}
	return got, err
}

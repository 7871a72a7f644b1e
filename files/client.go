package files

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"sync"
	"time"

	"github.com/opendsec/dsec"
)

// Client is the file service on the other end of a connection, where Serve
// answers. It trusts nothing that comes from there. An operation returns when
// its context ends, whatever the other side does; a reader handed to Write or
// Upload may then still be in one last Read, whose bytes go nowhere.
type Client struct {
	link  *link
	slots chan struct{} // one for each request the other side has not answered
	loop  sync.WaitGroup

	// Those that last as long as somebody likes do not keep the short ones out.
	streaming chan struct{}
	watching  chan struct{}

	mu      sync.Mutex
	streams map[uint32]*request
	last    uint32
	limit   uint32 // highest id that will be answered, after a go-away
	away    bool
}

var (
	_ FS      = (*Client)(nil)
	_ Watcher = (*Client)(nil)
)

// errNotBegun is the cause of an Unavailable call that the other side
// certainly did not begin, because it was about to end for want of work.
var errNotBegun = errors.New("the file service went idle")

// request is a call in flight.
type request struct {
	*stream
	answer chan *response  // one, when it is over
	shares []chan struct{} // of which it has an element
}

// NewClient speaks to a Serve at the other end of conn, which it owns.
func NewClient(conn io.ReadWriteCloser) *Client {
	c := &Client{link: newLink(conn), slots: make(chan struct{}, maxStreams), streams: map[uint32]*request{},
		streaming: make(chan struct{}, maxStreaming), watching: make(chan struct{}, maxWatching)}
	c.loop.Go(c.read)
	return c
}

// Done is closed when the connection has ended and calls can only fail.
func (c *Client) Done() <-chan struct{} { return c.link.done }

// Close ends the connection and every call in flight.
func (c *Client) Close() error {
	c.link.fail(errors.New("closed"))
	c.loop.Wait()
	c.link.writer.Wait()
	return nil
}

func (c *Client) read() {
	r := newFrameReader(c.link.conn)
	err := readHello(r)
	for err == nil {
		var f frame
		if f, err = r.next(); err == nil {
			err = c.frame(f)
		}
	}
	c.link.fail(err)
}

func (c *Client) frame(f frame) error {
	if f.kind == frameGoAway {
		c.goAway(f.id)
		return nil
	}
	c.mu.Lock()
	r, last := c.streams[f.id], c.last
	c.mu.Unlock()
	if r == nil || f.id > last {
		return errProtocol
	}
	switch {
	case f.kind == frameData:
		return r.push(f.payload)
	case f.kind == frameCredit && len(f.payload) == 4:
		return r.grant(binary.BigEndian.Uint32(f.payload))
	case f.kind == frameResponse:
		resp, err := decodeResponse(f.payload)
		if err == nil {
			c.over(f.id, r, resp)
		}
		return err
	}
	return errProtocol
}

// over ends a request, whoever still waits for it.
func (c *Client) over(id uint32, r *request, resp *response) {
	c.mu.Lock()
	delete(c.streams, id)
	c.mu.Unlock()
	r.answer <- resp // has room for it
	r.finish(io.EOF)
	r.close()
	give(r.shares)
	c.leave()
}

func (c *Client) goAway(last uint32) {
	c.mu.Lock()
	c.away, c.limit = true, last
	var lost []uint32
	for id := range c.streams {
		if id > last {
			lost = append(lost, id)
		}
	}
	c.mu.Unlock()
	for _, id := range lost {
		c.mu.Lock()
		r := c.streams[id]
		c.mu.Unlock()
		c.over(id, r, &response{err: errNotBegun})
	}
	c.leave()
}

// leave ends the connection when the other side wants to go and nothing is
// left to answer.
func (c *Client) leave() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.away && len(c.streams) == 0 {
		c.link.fail(errNotBegun)
	}
}

// take waits for the right to one more request. A watch beyond the most there
// may be is refused: none of the others need ever end.
func (c *Client) take(ctx context.Context, k *call) (shares []chan struct{}, err error) {
	defer func() {
		if err != nil {
			give(shares)
		}
	}()
	if k.op == callWatch {
		select {
		case c.watching <- struct{}{}:
			shares = append(shares, c.watching)
		default:
			return nil, dsec.Errorf(dsec.ResourceExhausted, opWatch, dsec.Quote(k.path), "this user has %d watches here", maxWatching)
		}
	}
	wanted := []chan struct{}{c.slots}
	if k.op.takesBody() || k.op == callRead || k.op == callDownload || k.op == callWatch {
		wanted = []chan struct{}{c.streaming, c.slots}
	}
	for _, w := range wanted {
		select {
		case w <- struct{}{}:
			shares = append(shares, w)
		case <-ctx.Done():
			return shares, fail(opNames[k.op], k.path, ctx.Err())
		case <-c.link.done:
			return shares, c.link.lost(opNames[k.op], k.path)
		}
	}
	return shares, nil
}

func give(shares []chan struct{}) {
	for _, s := range shares {
		<-s
	}
}

// begin sends a request.
func (c *Client) begin(ctx context.Context, k *call) (*request, error) {
	if deadline, ok := ctx.Deadline(); ok {
		k.limit = max(time.Until(deadline), time.Nanosecond)
	}
	payload := k.encode()
	if len(payload) > maxPayload {
		return nil, invalid(opNames[k.op], k.path, "globs longer than %d bytes", maxPayload)
	}
	shares, err := c.take(ctx, k)
	if err != nil {
		return nil, err
	}
	// Ids must reach the other side in their order, so the lock is held while
	// the frame is queued; the writer does not need it.
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.away {
		give(shares)
		return nil, dsec.E(dsec.Unavailable, opNames[k.op], dsec.Quote(k.path), errNotBegun)
	}
	c.last++
	r := &request{stream: newStream(ctx, c.link, c.last), answer: make(chan *response, 1), shares: shares}
	r.inLeft = window
	c.streams[r.id] = r
	c.link.tell(frameRequest, r.id, payload)
	return r, nil
}

// do runs a call: body is what it sends, receive takes what comes.
func (c *Client) do(ctx context.Context, k *call, body io.Reader, receive func(io.Reader) error) (*response, error) {
	op := opNames[k.op]
	if err := check(ctx, op, k.path); err != nil {
		return nil, err
	}
	r, err := c.begin(ctx, k)
	if err != nil {
		return nil, err
	}
	broken := make(chan error, 1)
	if body != nil {
		go r.pump(body, broken)
	}
	if receive != nil {
		if err := receive(r); err != nil && ctx.Err() == nil && !c.ended() {
			c.link.tell(frameCancel, r.id, nil)
			return nil, failPeer(op, k.path, err)
		}
	}
	select {
	case resp := <-r.answer:
		return c.outcome(k, resp, broken)
	default:
	}
	select {
	case resp := <-r.answer:
		return c.outcome(k, resp, broken)
	case <-ctx.Done():
		r.close()
		c.link.tell(frameCancel, r.id, nil)
		return nil, fail(op, k.path, ctx.Err())
	case <-c.link.done:
		return nil, c.link.lost(op, k.path)
	}
}

func (c *Client) ended() bool {
	select {
	case <-c.link.done:
		return true
	default:
		return false
	}
}

// outcome of an answered call. If the caller's own reader broke, that is the
// error, not what the other side made of it.
func (c *Client) outcome(k *call, resp *response, broken chan error) (*response, error) {
	select {
	case err := <-broken:
		return nil, failPeer(opNames[k.op], k.path, err)
	default:
	}
	if resp.err == errNotBegun {
		return nil, dsec.E(dsec.Unavailable, opNames[k.op], dsec.Quote(k.path), errNotBegun)
	}
	return resp, resp.err
}

// pump sends a body. It reads nothing before the request was begun, so that a
// request that never is can be sent elsewhere.
func (r *request) pump(body io.Reader, broken chan<- error) {
	if r.accepted() != nil {
		return
	}
	buf := make([]byte, maxPayload)
	for {
		n, err := body.Read(buf)
		if n > 0 {
			if _, werr := r.Write(buf[:n]); werr != nil {
				return
			}
		}
		if err == io.EOF {
			_ = r.end(true) // a lost link is seen by the caller
			return
		}
		if err != nil {
			broken <- err
			_ = r.end(false)
			return
		}
	}
}

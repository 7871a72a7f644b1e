package guest

import (
	"context"
	cryptorand "crypto/rand"
	"encoding/binary"
	"encoding/json"
	"errors"
	"io"
	"sync"
	"time"

	"github.com/opendsec/dsec"
)

// helloAgain is how often a guest that does not answer is greeted again: it may
// not have opened its end yet.
const helloAgain = 250 * time.Millisecond

// maxKept of one stream of a command, unless Options say otherwise.
const maxKept = 64 << 20

// Options of a Client.
type Options struct {
	Program string // version of the host, for the guest's log
	MaxKept int64  // most bytes of kept output that are taken of one stream; 0: 64 MiB
	Once    bool   // greet no second time: nothing is on its way when it was answered, and a guest that misses it never answers
}

// Client is one session with a guest.
type Client struct {
	conn  io.ReadWriteCloser
	mux   *mux
	hello Hello
	most  int64
	slots chan struct{} // one for each stream
	loop  sync.WaitGroup
}

// Connect begins a session over conn, which the Client owns also if it errs.
// Whatever is in the middle of something there is skipped.
func Connect(ctx context.Context, conn io.ReadWriteCloser, o Options) (*Client, error) {
	const op = "greet guest"
	var id [8]byte
	_, _ = cryptorand.Read(id[:]) // never errs
	w := newWire(conn)
	c := &Client{conn: conn, mux: newMux(w, binary.LittleEndian.Uint64(id[:]), nil), most: o.MaxKept, slots: make(chan struct{}, maxStreams-1)}
	if c.most == 0 {
		c.most = maxKept
	}
	body, err := json.Marshal(Hello{Versions: []int{Version}, Program: o.Program})
	if err != nil {
		_ = conn.Close()
		return nil, dsec.E(dsec.Internal, op, "", err)
	}
	greeted := make(chan Hello, 1)
	c.loop.Go(func() { c.read(greeted) })
	told := make(chan struct{})
	c.loop.Go(func() { c.greet(body, o.Once, told) })
	select {
	case c.hello = <-greeted:
		close(told)
		err = c.hello.Error.Err()
		if err == nil && c.hello.Version != Version {
			err = dsec.Errorf(dsec.Unsupported, op, "", "it answers in version %d, wanted %d", c.hello.Version, Version)
		}
	case <-ctx.Done():
		close(told)
		err = dsec.E(dsec.ClassOf(ctx.Err()), op, "", context.Cause(ctx))
	case <-c.mux.done:
		close(told)
		err = dsec.E(dsec.Unavailable, op, "", c.mux.cause())
	}
	if err != nil {
		c.end(errClosed)
		return nil, err
	}
	c.hello.Program, c.hello.Boot = plain(c.hello.Program), plain(c.hello.Boot)
	return c, nil
}

// greet says hello until it was answered; then it writes for the session.
func (c *Client) greet(body []byte, once bool, told <-chan struct{}) {
	again := time.NewTicker(helloAgain)
	defer again.Stop()
	if once {
		again.Stop()
	}
	for {
		if err := c.mux.wire.hello(c.mux.session, body); err != nil {
			c.mux.fail(err)
			return
		}
		select {
		case <-told:
			c.mux.write()
			return
		case <-c.mux.done:
			return
		case <-again.C:
		}
	}
}

func (c *Client) read(greeted chan<- Hello) {
	sc := newScanner(c.conn)
	for known := false; ; {
		p, err := sc.next()
		switch {
		case err != nil:
		case p.session != c.mux.session: // of an older session
		case p.kind == kindHello && !known:
			var h Hello
			if err = json.Unmarshal(p.payload, &h); err == nil {
				known = true
				greeted <- h // has room for it
			}
		case p.kind == kindHello: // the answer to one that was told again
		case !known:
			err = errProtocol
		default:
			err = c.mux.take(p)
		}
		if err != nil {
			c.mux.fail(err)
			_ = c.conn.Close()
			return
		}
	}
}

// Hello is what the guest said of itself.
func (c *Client) Hello() Hello { return c.hello }

// Done is closed when the session has ended and calls can only fail.
func (c *Client) Done() <-chan struct{} { return c.mux.done }

// Close ends the session and every call in flight. The guest goes on.
func (c *Client) Close() error {
	c.end(errClosed)
	return nil
}

func (c *Client) end(why error) {
	c.mux.fail(why)
	_ = c.conn.Close()
	c.loop.Wait()
}

// open begins a request. Streams beyond what a guest may have at once are waited for.
func (c *Client) open(ctx context.Context, window int, q Request) (*Stream, error) {
	select {
	case c.slots <- struct{}{}:
	default:
		select {
		case c.slots <- struct{}{}:
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-c.mux.done:
			return nil, c.mux.cause()
		}
	}
	s, err := c.mux.stream(window)
	if err != nil {
		<-c.slots
		return nil, err
	}
	s.freed = func() { <-c.slots }
	stop := context.AfterFunc(ctx, s.abandon)
	defer stop()
	if err := WriteMessage(s, q); err != nil {
		s.abandon()
		return nil, orContext(ctx, err)
	}
	return s, nil
}

func (s *Stream) abandon() { _ = s.Close() }

// orContext is the reason for which a call broke off.
func orContext(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return err
}

// answer reads what the guest answers to a request.
func (c *Client) answer(ctx context.Context, s *Stream) (a Answer, err error) {
	stop := context.AfterFunc(ctx, s.abandon)
	defer stop()
	if err := readMessage(s, maxAnswer, &a); err != nil {
		return a, orContext(ctx, err)
	}
	return a, a.Error.Err()
}

// begin asks and reads the answer of a request whose stream goes on.
func (c *Client) begin(ctx context.Context, window int, q Request) (*Stream, Answer, error) {
	s, err := c.open(ctx, window, q)
	if err != nil {
		return nil, Answer{}, broken(q, err)
	}
	a, err := c.answer(ctx, s)
	if err != nil {
		s.abandon()
		return nil, a, broken(q, err)
	}
	return s, a, nil
}

// call is begin of one that only has an answer.
func (c *Client) call(ctx context.Context, q Request) (Answer, error) {
	s, a, err := c.begin(ctx, talkWindow, q)
	if err == nil {
		s.abandon()
	}
	return a, err
}

// broken is the error of a call: what the guest answered, that its context
// ended, or that the session did.
func broken(q Request, err error) error {
	if _, ok := errors.AsType[*dsec.Error](err); ok {
		return err
	}
	class := dsec.ClassOf(err)
	if class == dsec.Internal {
		class = dsec.Unavailable
	}
	return dsec.E(class, "ask guest to "+q.Op, plain(q.object()), err)
}

func (q *Request) object() string {
	switch {
	case q.Exec != nil:
		return q.Exec.ID
	case q.ID != "":
		return q.ID
	}
	return ""
}

// Resume is the first call after every start and restore.
func (c *Client) Resume(ctx context.Context, r Resume) error {
	_, err := c.call(ctx, Request{Op: OpResume, Resume: &r})
	return err
}

// Freeze stops the sandbox until the next Resume. With sync what it wrote is on
// its disk before.
func (c *Client) Freeze(ctx context.Context, sync bool) error {
	_, err := c.call(ctx, Request{Op: OpFreeze, Sync: sync})
	return err
}

// Mount makes the sandbox. The same again is a success.
func (c *Client) Mount(ctx context.Context, m Mount) error {
	_, err := c.call(ctx, Request{Op: OpMount, Mount: &m})
	return err
}

// Stats are what the guest says that the sandbox uses.
func (c *Client) Stats(ctx context.Context) (Stats, error) {
	a, err := c.call(ctx, Request{Op: OpStats})
	if err != nil || a.Stats == nil {
		return Stats{}, err
	}
	return a.Stats.bounded(), nil
}

// Ended returns why the sandbox ended, once it has, though nobody asked for it.
func (c *Client) Ended(ctx context.Context) (string, error) {
	a, err := c.call(ctx, Request{Op: OpEnded})
	return plain(a.Ending), err
}

// Shutdown ends the sandbox: the command main is asked to, everything else is
// killed after grace. When it returns the disk has all it wrote.
func (c *Client) Shutdown(ctx context.Context, grace time.Duration) error {
	_, err := c.call(ctx, Request{Op: OpShutdown, Grace: grace})
	return err
}

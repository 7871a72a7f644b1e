package files

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"sync"
)

// stream is one request at one end: a body that comes in, a body that goes
// out, each with credit for so many bytes that the receiver has room for. One
// goroutine reads, one writes; the link's reader feeds it and never waits.
type stream struct {
	id  uint32
	l   *link
	ctx context.Context

	inReady  chan struct{} // holds a token when the fields of in changed
	outReady chan struct{} // of out

	mu     sync.Mutex
	in     [][]byte // received, not read
	inAt   int      // of in[0], read already
	inLeft int      // bytes the peer may still send
	inEnd  error    // after in: io.EOF or why it broke off
	used   int      // bytes read since credit was given
	out    int64    // bytes that may be sent
	closed bool     // nothing more is sent
}

func newStream(ctx context.Context, l *link, id uint32) *stream {
	return &stream{id: id, l: l, ctx: ctx, inReady: make(chan struct{}, 1), outReady: make(chan struct{}, 1)}
}

func wake(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

var (
	errStreamClosed = errors.New("request is over")
	errGivenUp      = errors.New("sender gave up")
)

// push takes received bytes; more than there was credit for is an error.
func (s *stream) push(p []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.inLeft -= len(p); s.inLeft < 0 {
		return errProtocol
	}
	if s.inEnd == nil && len(p) > 0 {
		s.in = append(s.in, s.keep(p))
		wake(s.inReady)
	}
	return nil
}

// keep copies received bytes, big ones into a buffer of the pool.
func (s *stream) keep(p []byte) []byte {
	if len(p) < maxPayload/2 {
		return append([]byte(nil), p...)
	}
	b := (*s.l.pool.Get().(*[]byte))[:len(p)]
	copy(b, p)
	return b
}

// finish ends the incoming body.
func (s *stream) finish(err error) {
	s.mu.Lock()
	if s.inEnd == nil {
		s.inEnd = err
	}
	s.mu.Unlock()
	wake(s.inReady)
}

// close ends the outgoing body for good.
func (s *stream) close() {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	wake(s.outReady)
}

// grant gives the sender more room.
func (s *stream) grant(n uint32) error {
	s.mu.Lock()
	s.out += int64(n)
	over := s.out > 1<<40
	s.mu.Unlock()
	wake(s.outReady)
	if over {
		return errProtocol
	}
	return nil
}

// allow lets the peer send the first bytes.
func (s *stream) allow() {
	s.mu.Lock()
	s.inLeft += window
	s.mu.Unlock()
	s.credit(window)
}

func (s *stream) credit(n int) {
	s.l.tell(frameCredit, s.id, binary.BigEndian.AppendUint32(nil, uint32(n)))
}

// Read implements io.Reader over the incoming body.
func (s *stream) Read(p []byte) (int, error) {
	for {
		if n, err := s.take(p); n > 0 || err != nil {
			return n, err
		}
		select {
		case <-s.inReady:
		case <-s.ctx.Done():
			return 0, s.ctx.Err()
		case <-s.l.done:
			if n, err := s.take(p); n > 0 || err != nil {
				return n, err
			}
			return 0, s.l.err
		}
	}
}

func (s *stream) take(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.in) == 0 {
		return 0, s.inEnd
	}
	n := copy(p, s.in[0][s.inAt:])
	if s.inAt += n; s.inAt == len(s.in[0]) {
		s.l.recycle(s.in[0])
		s.in[0], s.inAt = nil, 0
		s.in = s.in[1:]
	}
	if s.used += n; s.used >= window/2 && s.inEnd == nil {
		s.inLeft += s.used
		s.credit(s.used)
		s.used = 0
	}
	return n, nil
}

// Write implements io.Writer over the outgoing body.
func (s *stream) Write(p []byte) (int, error) {
	total := 0
	for len(p) > 0 {
		n, err := s.reserve(min(len(p), maxPayload))
		if err != nil {
			return total, err
		}
		if err := s.send(p[:n]); err != nil {
			return total, err
		}
		total, p = total+n, p[n:]
	}
	return total, nil
}

// reserve waits for credit and takes up to n bytes of it.
func (s *stream) reserve(n int) (int, error) {
	for {
		s.mu.Lock()
		if s.closed {
			s.mu.Unlock()
			return 0, errStreamClosed
		}
		if s.out > 0 {
			n = int(min(int64(n), s.out))
			s.out -= int64(n)
			s.mu.Unlock()
			return n, nil
		}
		s.mu.Unlock()
		select {
		case <-s.outReady:
		case <-s.ctx.Done():
			return 0, s.ctx.Err()
		case <-s.l.done:
			return 0, s.l.err
		}
	}
}

// accepted waits for the first credit, which says that the request was begun.
func (s *stream) accepted() error {
	n, err := s.reserve(1)
	if err == nil {
		err = s.grant(uint32(n))
	}
	return err
}

func (s *stream) send(p []byte) error {
	b := (*s.l.pool.Get().(*[]byte))[:frameHeader+len(p)]
	copy(b[frameHeader:], p)
	putHeader(b, frameData, s.id)
	return s.queue(b)
}

// queue hands a frame to the writer in the order of this stream.
func (s *stream) queue(b []byte) error {
	select {
	case s.l.data <- b:
		return nil
	case <-s.ctx.Done():
		return s.ctx.Err()
	case <-s.l.done:
		return s.l.err
	}
}

// end says that the outgoing body is complete, or given up.
func (s *stream) end(ok bool) error {
	code := byte(0)
	if !ok {
		code = 1
	}
	return s.queue(newFrame(frameEnd, s.id, []byte{code}))
}

var _ io.ReadWriter = (*stream)(nil)

package guest

import (
	"context"
	"encoding/binary"
	"io"
	"sync"
)

// Stream is one conversation within a session. One goroutine may read, and any
// number write, one after the other. A Stream must be closed.
type Stream struct {
	m      *mux
	id     uint32
	window int // bytes the peer may send ahead

	writing sync.Mutex // one Write at a time

	inReady  chan struct{} // holds a token when something came
	outReady chan struct{} // when the writer took something, or there is credit
	over     chan struct{} // closed when the peer sends nothing more
	freed    func()        // called by the first Close; may be nil

	// Guarded by m.mu.
	in      [][]byte // received, not read
	inLeft  int      // bytes the peer may still send
	owed    int      // bytes read, for which no credit was given
	ended   bool     // the peer sends nothing more
	aborted bool     // and has not said that that was all
	reset   bool     // the peer has forgotten it
	opening bool     // open is to be sent
	out     []byte   // of the Write in progress
	credit  int64    // bytes that may be sent
	last    bool     // the last data are to be sent
	sent    bool     // and were
	closed  bool     // here
	queued  bool     // is in the mux's queue of those with data
	urgent  bool     // is in the queue of those with something to tell
}

func (m *mux) newStream(id uint32, window int, credit int64) *Stream {
	return &Stream{m: m, id: id, window: window, inLeft: window, credit: credit, inReady: make(chan struct{}, 1),
		outReady: make(chan struct{}, 1), over: make(chan struct{})}
}

func wake(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// Read implements io.Reader.
func (s *Stream) Read(p []byte) (int, error) { return s.ReadContext(context.Background(), p) }

// ReadContext is Read that ends with ctx and then has read nothing.
func (s *Stream) ReadContext(ctx context.Context, p []byte) (int, error) {
	for {
		n, err := s.take(p)
		if n > 0 || err != nil || len(p) == 0 {
			return n, err
		}
		select {
		case <-s.inReady:
		case <-ctx.Done():
			return 0, ctx.Err()
		case <-s.m.done:
			if n, err := s.take(p); n > 0 || err != nil {
				return n, err
			}
			return 0, s.m.cause()
		}
	}
}

func (s *Stream) take(p []byte) (n int, err error) {
	s.m.mu.Lock()
	defer s.m.mu.Unlock()
	for len(s.in) > 0 && n < len(p) {
		c := copy(p[n:], s.in[0])
		n += c
		if s.in[0] = s.in[0][c:]; len(s.in[0]) == 0 {
			s.in = s.in[1:]
		}
	}
	if n == 0 {
		switch {
		case s.closed:
			return 0, errClosed
		case s.aborted && s.m.err != nil:
			return 0, s.m.err
		case s.aborted:
			return 0, errReset
		case s.ended:
			return 0, io.EOF
		}
		return 0, nil
	}
	s.m.unread -= n
	if s.owed += n; s.owed >= s.window/2 && !s.ended {
		s.m.tellLocked(s)
	}
	return n, nil
}

// Write implements io.Writer; it waits for credit.
func (s *Stream) Write(p []byte) (int, error) { return s.WriteContext(context.Background(), p) }

// WriteContext is Write that ends with ctx.
func (s *Stream) WriteContext(ctx context.Context, p []byte) (int, error) {
	s.writing.Lock()
	defer s.writing.Unlock()
	m := s.m
	m.mu.Lock()
	s.out = p
	m.queueLocked(s)
	for {
		left, err := len(s.out), s.brokenLocked()
		if left == 0 { // also if the peer has answered and gone meanwhile
			err = nil
		}
		if left == 0 || err != nil {
			s.out = nil
			m.queueLocked(s) // the end may have waited for this
			m.mu.Unlock()
			return len(p) - left, err
		}
		m.mu.Unlock()
		err = nil
		select {
		case <-s.outReady:
		case <-ctx.Done():
			err = ctx.Err()
		case <-m.done:
			err = m.cause()
		}
		m.mu.Lock()
		if err != nil {
			left, s.out = len(s.out), nil
			m.queueLocked(s)
			m.mu.Unlock()
			return len(p) - left, err
		}
	}
}

func (s *Stream) brokenLocked() error {
	switch {
	case s.closed || s.last:
		return errClosed
	case s.reset:
		return errReset
	}
	return nil
}

// CloseWrite says that nothing more is written.
func (s *Stream) CloseWrite() error {
	s.m.mu.Lock()
	defer s.m.mu.Unlock()
	if err := s.brokenLocked(); err != nil {
		return err
	}
	s.last = true
	s.m.queueLocked(s)
	wake(s.outReady)
	return nil
}

// Over is closed when the peer has sent its last, or has forgotten the stream.
func (s *Stream) Over() <-chan struct{} { return s.over }

// Close forgets the stream. What was not said to be the last is taken back.
func (s *Stream) Close() error {
	m := s.m
	m.mu.Lock()
	defer m.mu.Unlock()
	if s.closed {
		return nil
	}
	s.closed = true
	if s.freed != nil {
		defer s.freed()
	}
	for _, b := range s.in {
		m.unread -= len(b)
	}
	s.in = nil
	wake(s.inReady)
	wake(s.outReady)
	m.tellLocked(s) // if only that it is closed
	return nil
}

// pushLocked takes what the peer sent.
func (s *Stream) pushLocked(p packet) error {
	if s.inLeft -= len(p.payload); s.inLeft < 0 || s.ended {
		return errProtocol
	}
	if len(p.payload) > 0 && !s.closed {
		if s.m.unread += len(p.payload); s.m.unread > s.m.most {
			return errTooMuch
		}
		s.keepLocked(p.payload)
	}
	if p.flags&flagEnd != 0 {
		s.endLocked()
	}
	wake(s.inReady)
	return nil
}

// keepLocked joins small pieces, which would take more room than their bytes.
func (s *Stream) keepLocked(b []byte) {
	if n := len(s.in); n > 0 && len(s.in[n-1])+len(b) <= maxPayload {
		s.in[n-1] = append(s.in[n-1], b...)
		return
	}
	s.in = append(s.in, append([]byte(nil), b...))
}

func (s *Stream) endLocked() {
	if !s.ended {
		s.ended = true
		close(s.over)
	}
	wake(s.inReady)
	wake(s.outReady)
}

func (s *Stream) creditLocked(payload []byte) error {
	if len(payload) != 4 {
		return errProtocol
	}
	if s.credit += int64(binary.LittleEndian.Uint32(payload)); s.credit > 1<<32 {
		return errProtocol
	}
	s.m.queueLocked(s)
	return nil
}

// finishedLocked: nobody has anything more to say.
func (s *Stream) finishedLocked() bool { return s.sent && s.ended || s.reset }

package guest

import (
	cryptorand "crypto/rand"
	"encoding/binary"
	"errors"
	"io"
	"math/rand/v2"
	"sync"
)

const (
	hostWindow  = 128 << 10 // bytes the host may send ahead on a stream
	bulkWindow  = 128 << 10 // and the guest, on one with bytes
	talkWindow  = 16 << 10  // and on one with an answer only
	leastWindow = 4 << 10
	mostWindow  = 1 << 20
	maxStreams  = 4096
	maxUnread   = 64 << 20 // received and not read, of all streams
)

var (
	errProtocol = errors.New("the other end broke the protocol")
	errGap      = errors.New("packets are missing")
	errTooMuch  = errors.New("the other end sent more than is kept")
	errClosed   = errors.New("closed")
	errReset    = errors.New("the other end gave it up")
	errReplaced = errors.New("another session has begun")
)

// wire is the writing side of a channel, which sessions share one after the other.
type wire struct {
	w    io.Writer
	mu   sync.Mutex // held while a packet is written
	rand *rand.ChaCha8
	buf  []byte
}

func newWire(w io.Writer) *wire {
	var seed [32]byte
	_, _ = cryptorand.Read(seed[:]) // never errs
	return &wire{w: w, rand: rand.NewChaCha8(seed), buf: make([]byte, maxPacket)}
}

// send writes a packet whose payload is n bytes that fill puts into a buffer.
func (w *wire) send(p packet, fill func(b []byte) int) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	n := fill(w.buf[headerSize:])
	b := w.buf[:headerSize+n]
	p.seal(b, w.rand.Uint64())
	_, err := w.w.Write(b)
	return err
}

// hello ends whatever packet was half-sent and begins a session.
func (w *wire) hello(session uint64, body []byte) error {
	w.mu.Lock()
	_, err := w.w.Write(make([]byte, maxPacket))
	w.mu.Unlock()
	if err != nil {
		return err
	}
	return w.send(packet{kind: kindHello, session: session}, func(b []byte) int { return copy(b, body) })
}

// mux is one session at one end.
type mux struct {
	wire    *wire
	session uint64
	most    int           // bytes that may be unread
	open    func(*Stream) // of the guest: takes a stream the host opened
	awake   chan struct{} // holds a token when the writer has something to do
	done    chan struct{}
	writer  sync.WaitGroup

	received uint32 // packets, by the one that reads
	written  uint32 // by the writer

	mu      sync.Mutex
	err     error // why it ended
	streams map[uint32]*Stream
	last    uint32    // id of the newest stream
	unread  int       // bytes
	urgent  []*Stream // have something to tell
	queue   []*Stream // have data
}

func newMux(w *wire, session uint64, open func(*Stream)) *mux {
	return &mux{wire: w, session: session, most: maxUnread, open: open, awake: make(chan struct{}, 1), done: make(chan struct{}), streams: map[uint32]*Stream{}}
}

func (m *mux) start() { m.writer.Go(m.write) }

// fail ends the session; the first reason stands.
func (m *mux) fail(err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.err != nil {
		return
	}
	m.err = err
	close(m.done)
	for _, s := range m.streams { // who waits for the peer's last waits no longer
		s.aborted = s.aborted || !s.ended
		s.endLocked()
	}
}

func (m *mux) cause() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.err
}

// stream opens a stream with so many bytes that the guest may send ahead.
func (m *mux) stream(window int) (*Stream, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.err != nil {
		return nil, m.err
	}
	m.last++
	s := m.newStream(m.last, window, hostWindow)
	s.opening = true
	m.streams[s.id] = s
	m.tellLocked(s)
	return s, nil
}

func (m *mux) tellLocked(s *Stream) {
	if !s.urgent {
		s.urgent = true
		m.urgent = append(m.urgent, s)
		wake(m.awake)
	}
}

func (m *mux) queueLocked(s *Stream) {
	if !s.queued && (len(s.out) > 0 && s.credit > 0 || s.last && !s.sent && len(s.out) == 0) {
		s.queued = true
		m.queue = append(m.queue, s)
		wake(m.awake)
	}
}

// take handles a packet of this session.
func (m *mux) take(p packet) error {
	if m.received++; p.number != m.received {
		return errGap
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if p.kind == kindOpen {
		return m.openLocked(p)
	}
	s := m.streams[p.stream]
	if s == nil {
		if p.stream == 0 || p.stream > m.last {
			return errProtocol
		}
		return nil // it is over
	}
	switch p.kind {
	case kindData:
		if err := s.pushLocked(p); err != nil {
			return err
		}
	case kindCredit:
		return s.creditLocked(p.payload)
	case kindReset:
		s.reset, s.aborted = true, s.aborted || !s.ended
		s.endLocked()
	default:
		return errProtocol
	}
	if s.finishedLocked() {
		delete(m.streams, s.id)
	}
	return nil
}

func (m *mux) openLocked(p packet) error {
	if m.open == nil || p.stream <= m.last || len(p.payload) != 4 || len(m.streams) >= maxStreams {
		return errProtocol
	}
	n := binary.LittleEndian.Uint32(p.payload)
	if n < leastWindow || n > mostWindow {
		return errProtocol
	}
	m.last = p.stream
	s := m.newStream(p.stream, hostWindow, int64(n))
	m.streams[s.id] = s
	m.open(s)
	return nil
}

// write sends what streams have to say: first what is urgent, then data, each
// stream a packet in turn.
func (m *mux) write() {
	for {
		p, fill, ok := m.pick()
		if !ok {
			select {
			case <-m.awake:
				continue
			case <-m.done:
				return
			}
		}
		m.written++
		p.session, p.number = m.session, m.written
		if err := m.wire.send(p, fill); err != nil {
			m.fail(err)
			return
		}
	}
}

func number(n int) func(b []byte) int {
	return func(b []byte) int { binary.LittleEndian.PutUint32(b, uint32(n)); return 4 }
}

func nothing([]byte) int { return 0 }

func (m *mux) pick() (p packet, fill func([]byte) int, ok bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for m.err == nil && len(m.urgent) > 0 {
		s := m.urgent[0]
		p.stream = s.id
		switch {
		case s.opening:
			s.opening = false
			p.kind = kindOpen
			return p, number(s.window), true
		case s.closed:
			m.urgent, s.urgent = m.urgent[1:], false
			if m.dropLocked(s) {
				p.kind = kindReset
				return p, nothing, true
			}
			continue
		}
		m.urgent, s.urgent = m.urgent[1:], false
		if n := s.owed; n > 0 && !s.ended && !s.reset {
			s.inLeft, s.owed = s.inLeft+n, 0
			p.kind = kindCredit
			return p, number(n), true
		}
	}
	for m.err == nil && len(m.queue) > 0 {
		s := m.queue[0]
		m.queue, s.queued = m.queue[1:], false
		if s.reset || s.closed && !s.last {
			continue
		}
		if p, fill, ok = m.dataLocked(s); ok {
			return p, fill, true
		}
	}
	return p, nil, false
}

// dropLocked forgets a closed stream and reports whether the peer must be told.
func (m *mux) dropLocked(s *Stream) bool {
	if m.streams[s.id] == nil || s.last && !s.sent {
		return false // known to the peer; or the last data are on their way
	}
	delete(m.streams, s.id)
	return true
}

// dataLocked makes a packet of what a stream has to send. The bytes are copied
// now, since the Write may be given up.
func (m *mux) dataLocked(s *Stream) (p packet, fill func([]byte) int, ok bool) {
	p = packet{kind: kindData, stream: s.id}
	n := int(min(int64(len(s.out)), s.credit, maxPayload))
	if n == 0 && !(s.last && !s.sent && len(s.out) == 0) {
		return p, nil, false
	}
	b := append([]byte(nil), s.out[:n]...)
	s.out, s.credit = s.out[n:], s.credit-int64(n)
	if len(s.out) == 0 && s.last {
		p.flags, s.sent = flagEnd, true
		if s.finishedLocked() {
			delete(m.streams, s.id)
		} else if s.closed { // the rest is of no interest
			m.tellLocked(s)
		}
	}
	m.queueLocked(s)
	wake(s.outReady)
	return p, func(to []byte) int { return copy(to, b) }, true
}

package files

import (
	"encoding/binary"
	"errors"
	"io"
	"sync"

	"github.com/opendsec/dsec"
)

// The wire is specified in docs/formats/files.md.
const (
	wireVersion  = 1
	frameHeader  = 9 // length, type, id
	maxPayload   = 64 << 10
	window       = 512 << 10 // bytes of a body that may be on the way, per stream and direction
	maxStreams   = 128       // requests at the same time
	maxStreaming = 96        // of them reads, bodies and watches, which last as long as somebody likes
	maxWatching  = 64        // of those, watches
	socketBuffer = 1 << 20
)

type frameType byte

const (
	frameHello    frameType = 1 // "DSFS", version
	frameRequest  frameType = 2 // a call
	frameData     frameType = 3 // bytes of a body
	frameEnd      frameType = 4 // the client's body is complete (0) or was given up (1)
	frameResponse frameType = 5 // the last frame of a request
	frameCancel   frameType = 6 // the client no longer wants the answer
	frameCredit   frameType = 7 // so many more bytes may be sent
	frameGoAway   frameType = 8 // requests after this id were not begun and never will be
)

var wireMagic = []byte{'D', 'S', 'F', 'S', wireVersion}

// frame is one message. The payload of a received one is valid until the next
// is read.
type frame struct {
	kind    frameType
	id      uint32
	payload []byte
}

// errProtocol ends a connection whose other side does not keep to the format.
var errProtocol = errors.New("malformed frame")

// frameReader takes frames off a stream or packet socket. Every read has room
// for a whole frame, so that no packet is cut.
type frameReader struct {
	r          io.Reader
	buf        []byte
	start, end int
}

func newFrameReader(r io.Reader) *frameReader {
	return &frameReader{r: r, buf: make([]byte, 2*(frameHeader+maxPayload))}
}

func (f *frameReader) next() (frame, error) {
	if err := f.fill(frameHeader); err != nil {
		return frame{}, err
	}
	h := f.buf[f.start:]
	size := int(binary.BigEndian.Uint32(h))
	out := frame{kind: frameType(h[4]), id: binary.BigEndian.Uint32(h[5:])}
	if size > maxPayload {
		return frame{}, errProtocol
	}
	if err := f.fill(frameHeader + size); err != nil {
		return frame{}, err
	}
	out.payload = f.buf[f.start+frameHeader : f.start+frameHeader+size]
	f.start += frameHeader + size
	return out, nil
}

// fill has at least n bytes in the buffer.
func (f *frameReader) fill(n int) error {
	for f.end-f.start < n {
		if f.start > 0 && (f.start == f.end || len(f.buf)-f.end < frameHeader+maxPayload) {
			f.end = copy(f.buf, f.buf[f.start:f.end])
			f.start = 0
		}
		got, err := f.r.Read(f.buf[f.end:])
		f.end += got
		if err == io.EOF && f.end > f.start {
			err = io.ErrUnexpectedEOF
		}
		if err != nil && f.end-f.start < n {
			return err
		}
	}
	return nil
}

func putHeader(b []byte, kind frameType, id uint32) {
	binary.BigEndian.PutUint32(b, uint32(len(b)-frameHeader))
	b[4] = byte(kind)
	binary.BigEndian.PutUint32(b[5:], id)
}

func newFrame(kind frameType, id uint32, payload []byte) []byte {
	b := make([]byte, frameHeader+len(payload))
	copy(b[frameHeader:], payload)
	putHeader(b, kind, id)
	return b
}

// link is one end of a connection: frames are queued for one writing
// goroutine, so that nobody waits for a peer that does not read except those
// whose bytes it is.
type link struct {
	conn    io.ReadWriteCloser
	data    chan []byte // frames their senders wait with
	control chan []byte // small ones, at most a few per stream
	done    chan struct{}
	once    sync.Once
	err     error // why; valid after done
	writer  sync.WaitGroup
	pool    sync.Pool // *[]byte, room for a whole frame
}

func newLink(conn io.ReadWriteCloser) *link {
	l := &link{conn: conn, data: make(chan []byte, 4), control: make(chan []byte, 16*maxStreams), done: make(chan struct{})}
	l.pool.New = func() any { b := make([]byte, frameHeader+maxPayload); return &b }
	if c, ok := conn.(interface{ SetWriteBuffer(int) error }); ok {
		_ = c.SetWriteBuffer(socketBuffer) // what the kernel grants is fine
	}
	l.control <- newFrame(frameHello, 0, wireMagic)
	l.writer.Go(l.write)
	return l
}

func (l *link) write() {
	for {
		var b []byte
		select {
		case b = <-l.control: // before bulk bytes
		default:
			select {
			case b = <-l.control:
			case b = <-l.data:
			case <-l.done:
				return
			}
		}
		if _, err := l.conn.Write(b); err != nil {
			l.fail(err)
			return
		}
		l.recycle(b)
	}
}

// recycle takes back a buffer of the pool; others are left to the collector.
func (l *link) recycle(b []byte) {
	if cap(b) == frameHeader+maxPayload {
		b = b[:cap(b)]
		l.pool.Put(&b)
	}
}

// fail ends the connection; the first reason stays.
func (l *link) fail(err error) {
	l.once.Do(func() {
		l.err = err
		close(l.done)
		l.conn.Close()
	})
}

// tell queues a small frame. A peer that has let so many pile up is hung.
func (l *link) tell(kind frameType, id uint32, payload []byte) {
	select {
	case l.control <- newFrame(kind, id, payload):
	default:
		l.fail(errors.New("peer does not read"))
	}
}

// lost is the error of a call whose connection ended.
func (l *link) lost(op, path string) error {
	return dsec.Errorf(dsec.Unavailable, op, dsec.Quote(path), "connection to the file service ended: %w", l.err)
}

package qemu

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
)

// Bounds of what QEMU may say and of how long it may think.
const (
	maxQMPLine  = 1 << 20
	qmpDeadline = 20 * time.Second
)

// monitor speaks QMP with one QEMU. A line that is none, or is too long, breaks it:
// what talks like that is no QEMU any more, and every call from then on says so.
type monitor struct {
	conn net.Conn
	done chan struct{} // closed when nothing comes any more
	err  error         // why; after done

	foreign int // bytes that may still be skipped of what another asked; the reader's

	mu      sync.Mutex
	next    int64
	waiting map[int64]chan reply
}

type reply struct {
	ID     *int64          `json:"id"`
	Return json.RawMessage `json:"return"`
	Error  *qmpError       `json:"error"`
	Event  string          `json:"event"`
	Data   json.RawMessage `json:"data"`
	QMP    json.RawMessage `json:"QMP"`
}

type qmpError struct {
	Class string `json:"class"`
	Desc  string `json:"desc"`
}

// newMonitor takes the connection. Events are handed to on, one after the other, by
// the goroutine that reads, which ends with the connection.
func newMonitor(conn net.Conn, on func(event string, data json.RawMessage)) *monitor {
	m := &monitor{conn: conn, done: make(chan struct{}), waiting: map[int64]chan reply{}}
	m.start(on)
	return m
}

// resumeMonitor is newMonitor of a connection that another process used up to any byte.
// Until our first answer, what makes no sense is a part of what was for that one; its
// numbers are not ours.
func resumeMonitor(conn net.Conn, on func(event string, data json.RawMessage)) *monitor {
	m := &monitor{conn: conn, done: make(chan struct{}), waiting: map[int64]chan reply{}, foreign: 4 * maxQMPLine, next: 1<<32 + rand.Int64N(1<<50)}
	m.start(on)
	return m
}

func (m *monitor) start(on func(event string, data json.RawMessage)) {
	go func() {
		m.err = m.read(on)
		_ = m.conn.Close()
		close(m.done)
	}()
}

// interrupt ends a line that another process may have begun. The byte is in no JSON: QEMU
// gives up what it has read so far, and says that it is an error.
func (m *monitor) interrupt(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, qmpDeadline)
	defer cancel()
	return m.send(ctx, []byte{0xff}, nil)
}

// skip says whether a line that is not ours may be passed over.
func (m *monitor) skip(text []byte) bool {
	m.foreign = max(m.foreign-len(text), 0)
	return m.foreign > 0
}

// errMonitor is why a monitor that QEMU did not close is of no use.
var errMonitor = errors.New("what it says on QMP is not QMP")

func (m *monitor) read(on func(string, json.RawMessage)) error {
	const op, object = "read", "QMP"
	r := bufio.NewReaderSize(m.conn, 4096)
	for {
		text, err := readLine(r)
		if err != nil {
			return err
		}
		var l reply
		if err := json.Unmarshal(text, &l); err != nil {
			if m.skip(text) {
				continue
			}
			return dsec.E(dsec.Corrupt, op, object, errors.Join(errMonitor, err))
		}
		switch {
		case l.QMP != nil:
		case l.Event != "":
			on(l.Event, l.Data)
		case l.ID != nil && (l.Return != nil) != (l.Error != nil):
			m.mu.Lock()
			w := m.waiting[*l.ID]
			delete(m.waiting, *l.ID)
			m.mu.Unlock()
			if w != nil { // else nobody waited that long
				m.foreign = 0
				w <- l
			}
		case m.skip(text):
		default:
			return dsec.Errorf(dsec.Corrupt, op, object, "%w: neither an answer nor an event: %s", errMonitor, dsec.Quote(string(text)))
		}
	}
}

func readLine(r *bufio.Reader) ([]byte, error) {
	var text []byte
	for {
		part, err := r.ReadSlice('\n')
		text = append(text, part...)
		switch {
		case len(text) > maxQMPLine:
			return nil, dsec.Errorf(dsec.Corrupt, "read", "QMP", "%w: a line of more than %d bytes", errMonitor, maxQMPLine)
		case err == nil:
			return text, nil
		case !errors.Is(err, bufio.ErrBufferFull):
			if errors.Is(err, io.EOF) || errors.Is(err, net.ErrClosed) {
				err = io.ErrUnexpectedEOF
			}
			return nil, dsec.E(dsec.Unavailable, "read", "QMP", err)
		}
	}
}

// call runs a command; into may be nil. A refusal is Internal with QEMU's words.
func (m *monitor) call(ctx context.Context, name string, args, into any) error {
	return m.callWith(ctx, name, args, into, nil)
}

// callWith is call, and hands QEMU a file with it.
func (m *monitor) callWith(ctx context.Context, name string, args, into any, file *os.File) error {
	ctx, cancel := context.WithTimeout(ctx, qmpDeadline)
	defer cancel()
	answer := make(chan reply, 1)
	m.mu.Lock()
	m.next++
	id := m.next
	m.waiting[id] = answer
	m.mu.Unlock()
	defer func() {
		m.mu.Lock()
		delete(m.waiting, id)
		m.mu.Unlock()
	}()
	text, err := json.Marshal(struct {
		Execute   string `json:"execute"`
		Arguments any    `json:"arguments,omitempty"`
		ID        int64  `json:"id"`
	}{name, args, id})
	if err != nil {
		return dsec.E(dsec.Internal, "QMP", name, err)
	}
	if err := m.send(ctx, text, file); err != nil {
		if dsec.ClassOf(err) == dsec.Unavailable {
			<-m.done // the connection is closed
			if errors.Is(m.err, errMonitor) {
				err = m.err
			}
		}
		return dsec.E(dsec.ClassOf(err), "QMP", name, err)
	}
	select {
	case l := <-answer:
		return l.result(name, into)
	case <-m.done:
		select {
		case l := <-answer: // it was the last that came
			return l.result(name, into)
		default:
			return dsec.E(dsec.ClassOf(m.err), "QMP", name, m.err)
		}
	case <-ctx.Done():
		return dsec.E(dsec.ClassOf(ctx.Err()), "QMP", name, ctx.Err())
	}
}

// send writes one line; a QEMU that reads nothing holds it up to the deadline only.
func (m *monitor) send(ctx context.Context, text []byte, file *os.File) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := ctx.Err(); err != nil {
		return err
	}
	if d, ok := ctx.Deadline(); ok {
		_ = m.conn.SetWriteDeadline(d)
	}
	text = append(text, '\n')
	all := len(text)
	var err error
	if unixConn, ok := m.conn.(*net.UnixConn); ok && file != nil {
		// The file comes with the first bytes.
		var n int
		n, _, err = unixConn.WriteMsgUnix(text, unix.UnixRights(int(file.Fd())), nil)
		text = text[n:]
	}
	if err == nil && len(text) > 0 {
		var n int
		n, err = m.conn.Write(text)
		text = text[n:]
	}
	if err == nil {
		return nil
	}
	if e, ok := errors.AsType[net.Error](err); ok && e.Timeout() {
		if len(text) < all {
			_ = m.conn.Close() // a part of a line is out: nothing can follow it
		}
		return dsec.E(dsec.Timeout, "write", "QMP", err)
	}
	_ = m.conn.Close()
	return dsec.E(dsec.Unavailable, "write", "QMP", err)
}

func (l reply) result(name string, into any) error {
	if l.Error != nil {
		return dsec.Errorf(dsec.Internal, "QMP", name, "%s", dsec.Quote(l.Error.Desc))
	}
	if into == nil {
		return nil
	}
	if err := json.Unmarshal(l.Return, into); err != nil {
		return dsec.E(dsec.Corrupt, "QMP", name, err)
	}
	return nil
}

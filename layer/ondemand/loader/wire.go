package loader

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/linux"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/layer/ondemand"
)

// The protocol, see docs/formats/loader.md.
const (
	version  = 2
	maxFrame = 64 << 10
	maxFiles = 8
	maxText  = 2 << 10 // of an error
	// sendWithin is how long the other end may leave a message unread that finds
	// no room before it. Then the connection ends.
	sendWithin = 10 * time.Second
)

// op is what a frame asks for, or, from the loader, tells.
type op string

const (
	opHello  op = "hello"  // answered with the sessions it serves
	opServe  op = "serve"  // a session, with its descriptors
	opEvents op = "events" // a group of pre-content events and its journal
	opReady  op = "ready"  // all sessions have been handed over
	opFetch  op = "fetch"  // ranges of a layer, answered when they are there
	opStatus op = "status" // of every layer
	opTrace  op = "trace"  // what was read first of a layer
	opLet    op = "let"    // a layer of which no session is left
	opNoted  op = "noted"  // a trouble is written down
	opRoom   op = "room"   // what may still be kept
	opCounts op = "counts" // of the whole loader

	opShort   op = "short"   // something found no room
	opDone    op = "done"    // all data of a layer are here
	opEnded   op = "ended"   // the last user of a session is gone
	opTrouble op = "trouble" // a read of a layer failed
)

// frame is one message; descriptors travel beside it.
type frame struct {
	V       int          `json:"v"`
	ID      uint64       `json:"id,omitempty"` // of a request, and of its answer; 0: told
	Op      op           `json:"op"`
	Error   *trouble     `json:"error,omitempty"`   // of an answer
	Session string       `json:"session,omitempty"` // of a trouble: "" if it is not known in which
	Digest  layer.Digest `json:"digest,omitempty"`
	Whole   bool         `json:"whole,omitempty"`  // of a serve: data alone, with nothing missing
	Size    int64        `json:"size,omitempty"`   // then: of the data
	Table   layer.Digest `json:"table,omitempty"`  // of the chunks of its data
	Events  bool         `json:"events,omitempty"` // of hello: a group is being answered; of let: all sessions by events end
	PID     int          `json:"pid,omitempty"`

	Number     uint64    `json:"number,omitempty"`     // of a trouble: failed reads it speaks of; of noted: the same, 0 if it was not taken
	Generation uint64    `json:"generation,omitempty"` // of a trouble and of noted: what the number counts
	At         time.Time `json:"at,omitzero"`          // of a trouble: when the first of them failed; of ended

	Left     int64              `json:"left,omitempty"`     // of room: bytes
	Full     bool               `json:"full,omitempty"`     // of short: the disk is
	Uncached *ondemand.Uncached `json:"uncached,omitempty"` // of counts
	Blobs    json.RawMessage    `json:"blobs,omitempty"`    // of counts

	files []*os.File
}

// trouble is an error on its way.
type trouble struct {
	Class dsec.Class `json:"class"`
	Text  string     `json:"text"`
}

func troubleOf(err error) *trouble {
	if err == nil {
		return nil
	}
	return &trouble{Class: dsec.ClassOf(err), Text: cut(err.Error())}
}

// cut bounds the text of an error: it may have in it what a store answered.
func cut(text string) string {
	if len(text) <= maxText {
		return text
	}
	return strings.ToValidUTF8(text[:maxText-len("…")], "") + "…"
}

func (f *frame) err() error {
	if f.Error == nil {
		return nil
	}
	class := f.Error.Class
	if !slices.Contains(dsec.Classes, class) {
		class = dsec.Internal
	}
	return dsec.E(class, "ask the loader", string(f.Op), errors.New(cut(f.Error.Text)))
}

func (f *frame) close() {
	for _, x := range f.files {
		_ = x.Close() // nil: was taken
	}
	f.files = nil
}

// conn sends and receives frames over a SEQPACKET connection.
type conn struct {
	c      *net.UnixConn
	within time.Duration // of a write; 0: sendWithin
	mu     sync.Mutex    // of writes
}

// errTooLarge is why a message was not sent.
var errTooLarge = errors.New("message is too large")

// send sends a frame; the descriptors in it stay the caller's. Another end that
// takes nothing for too long is given up.
func (c *conn) send(f frame) error {
	f.V = version
	b, err := json.Marshal(f)
	if err != nil {
		return err
	}
	if len(b) > maxFrame {
		return fmt.Errorf("%w: %d bytes, at most %d", errTooLarge, len(b), maxFrame)
	}
	var oob []byte
	if len(f.files) > 0 {
		fds, err := numbers(f.files)
		if err != nil {
			return err
		}
		oob = unix.UnixRights(fds...)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.c.SetWriteDeadline(time.Now().Add(cmp.Or(c.within, sendWithin))); err != nil {
		return err
	}
	_, _, err = c.c.WriteMsgUnix(b, oob, nil)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		_ = c.c.Close() // who waits for it to be read would do so for ever
	}
	return err
}

// numbers of descriptors, whose files must live on. Not by Fd, which has all who
// share them wait in their reads.
func numbers(files []*os.File) (fds []int, err error) {
	for _, x := range files {
		raw, err := x.SyscallConn()
		if err != nil {
			return nil, err
		}
		if err := raw.Control(func(fd uintptr) { fds = append(fds, int(fd)) }); err != nil {
			return nil, err
		}
	}
	return fds, nil
}

// recv receives frames; one caller at a time, with a buffer of its own.
func (c *conn) recv(buf []byte) (frame, error) {
	oob := make([]byte, unix.CmsgSpace(4*maxFiles))
	n, oobn, flags, _, err := c.c.ReadMsgUnix(buf, oob)
	if err != nil {
		return frame{}, err
	}
	var f frame
	f.files, err = received(oob[:oobn])
	switch {
	case err != nil:
	case n == 0:
		err = net.ErrClosed // SEQPACKET has no other end of file
	case flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0:
		err = errors.New("message was cut")
	default:
		err = f.decode(buf[:n])
	}
	if err != nil {
		f.close()
	}
	return f, err
}

// answer is send, of an error if what was asked for is too large to be sent: who
// asked waits for something.
func (c *conn) answer(f frame) error {
	err := c.send(f)
	if errors.Is(err, errTooLarge) || errors.Is(err, unix.EMSGSIZE) {
		err = c.send(frame{ID: f.ID, Op: f.Op, Error: troubleOf(dsec.E(dsec.Internal, "answer the agent", string(f.Op), err))})
	}
	return err
}

// errVersion is that the other end is of another program.
var errVersion = errors.New("other protocol version")

func (f *frame) decode(b []byte) error {
	var of struct {
		V int `json:"v"`
	}
	if err := json.Unmarshal(b, &of); err != nil {
		return err
	}
	if of.V != version {
		return fmt.Errorf("%w: %d, this program speaks %d", errVersion, of.V, version)
	}
	if err := json.Unmarshal(b, f); err != nil {
		return err
	}
	for _, d := range []layer.Digest{f.Digest, f.Table} {
		if d == "" {
			continue
		}
		if _, err := layer.ParseDigest(string(d)); err != nil {
			return err
		}
	}
	return nil
}

// maxList bounds a list on its way, in bytes.
const maxList = 8 << 20

// listFile is a list in memory: of ranges, names or layers.
func listFile(list any) (*os.File, error) {
	b, err := json.Marshal(list)
	if err != nil {
		return nil, err
	}
	if len(b) > maxList {
		return nil, fmt.Errorf("%w: list of %d bytes, at most %d", errTooLarge, len(b), maxList)
	}
	return linux.SealedFile("list", b)
}

// give puts a list into an answer, or why there is none.
func (f *frame) give(list any) {
	x, err := listFile(list)
	if err != nil {
		f.Error = troubleOf(dsec.E(dsec.Internal, "answer the agent", string(f.Op), err))
		return
	}
	f.files = []*os.File{x}
}

func readList[T any](f *os.File) (list []T, err error) {
	b, err := readWhole(f, maxList)
	if err != nil {
		return nil, err
	}
	return list, json.Unmarshal(b, &list)
}

// readWhole reads a file that was handed over and is of at most so many bytes.
func readWhole(f *os.File, most int64) ([]byte, error) {
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if st.Size() > most {
		return nil, fmt.Errorf("%d bytes, at most %d", st.Size(), most)
	}
	b := make([]byte, st.Size())
	_, err = f.ReadAt(b, 0)
	return b, err
}

// received takes the descriptors of a message. What is no regular file is waited
// for by the runtime.
func received(oob []byte) (files []*os.File, err error) {
	fds, err := linux.Received(oob)
	for _, fd := range fds {
		var st unix.Stat_t
		if unix.Fstat(fd, &st) == nil && st.Mode&unix.S_IFMT != unix.S_IFREG {
			_ = unix.SetNonblock(fd, true)
		}
		files = append(files, os.NewFile(uintptr(fd), "received"))
	}
	return files, err
}

package loader

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
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
	version  = 1
	maxFrame = 256 << 10
	maxFiles = 8
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
	Error   *trouble     `json:"error,omitempty"` // of an answer
	Session string       `json:"session,omitempty"`
	Digest  layer.Digest `json:"digest,omitempty"`
	Names   []string     `json:"names,omitempty"`
	Whole   bool         `json:"whole,omitempty"` // of a serve: data alone, with nothing missing
	Size    int64        `json:"size,omitempty"`  // then: of the data
	Table   layer.Digest `json:"table,omitempty"` // of the chunks of its data
	Layers  []Status     `json:"layers,omitempty"`
	Events  bool         `json:"events,omitempty"` // of hello: a group is being answered; of let: all sessions by events end
	PID     int          `json:"pid,omitempty"`
	Number  uint64       `json:"number,omitempty"` // of a trouble: failed reads it speaks of; of noted: the same
	At      time.Time    `json:"at,omitzero"`      // of a trouble: when the first of them failed

	Left    int64             `json:"left,omitempty"`    // of room: bytes
	Full    bool              `json:"full,omitempty"`    // of short: the disk is
	Through *ondemand.Through `json:"through,omitempty"` // of status

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
	return &trouble{Class: dsec.ClassOf(err), Text: err.Error()}
}

func (f *frame) err() error {
	if f.Error == nil {
		return nil
	}
	return dsec.E(f.Error.Class, "ask the loader", string(f.Op), errors.New(f.Error.Text))
}

func (f *frame) close() {
	for _, x := range f.files {
		_ = x.Close() // nil: was taken
	}
	f.files = nil
}

// conn sends and receives frames over a SEQPACKET connection.
type conn struct {
	c  *net.UnixConn
	mu sync.Mutex // of writes
}

// send sends a frame; the descriptors in it stay the caller's.
func (c *conn) send(f frame) error {
	f.V = version
	b, err := json.Marshal(f)
	if err != nil {
		return err
	}
	if len(b) > maxFrame {
		return fmt.Errorf("message of %d bytes, at most %d", len(b), maxFrame)
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
	_, _, err = c.c.WriteMsgUnix(b, oob, nil)
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

func (f *frame) decode(b []byte) error {
	if err := json.Unmarshal(b, f); err != nil {
		return err
	}
	if f.V != version {
		return fmt.Errorf("protocol version %d, this program speaks %d", f.V, version)
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

// maxRanges bounds a list of ranges on its way, in bytes.
const maxRanges = 8 << 20

// rangesFile is a list of ranges in memory.
func rangesFile(rs []layer.Range) (*os.File, error) {
	b, err := json.Marshal(rs)
	if err != nil {
		return nil, err
	}
	return linux.SealedFile("ranges", b)
}

func readRanges(f *os.File) (rs []layer.Range, err error) {
	b, err := readWhole(f, maxRanges)
	if err != nil {
		return nil, err
	}
	return rs, json.Unmarshal(b, &rs)
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

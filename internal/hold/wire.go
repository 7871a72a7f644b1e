package hold

import (
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"sync"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/linux"
)

// protocolVersion is in every frame; see docs/formats/hold.md.
const (
	protocolVersion = 5
	frameHeader     = 24
	maxInline       = 32 << 10 // larger bodies travel in a memfd
	maxBody         = 64 << 20
	maxFiles        = 64
	frameMagic      = 0x4844
)

const (
	flagMemfd = 1 // the body is in the last descriptor
	flagError = 2 // the body is a wireError
)

// op is what a frame is about. A reply has the op of its request.
type op uint16

const (
	opHello op = iota + 1
	opPut
	opGet
	opDrop
	opNames
	opSpawn
	opEnter
	opExec
	opFind
	_ // was wait: the end of a command comes as an event
	opSignal
	opKill
	opRelease
	opStdin
	opCloseStdin
	opResize
	opFollow
	opSpool
	opClock
	opSignalInit
	opKillSandbox
	opRemove
	opFiles
	opOpenIn
	opNamespaces
	opList
	opAck
	opShutdown
	opUpgrade
	opEvent // from hold, no reply
	opRefusals
	opPlain
	opFindPlain
	opPlains
	opKillPlain
	opCells
	opEnd // none
)

// forEver says that an operation is understood by every version, so that each
// hold can be greeted and replaced.
func (o op) forEver() bool { return o == opHello || o == opUpgrade }

// frame is one message with its descriptors, which the receiver owns.
type frame struct {
	op    op
	id    uint64
	flags uint32
	body  []byte
	files []*os.File

	version uint16 // of who sent it
}

func (f *frame) close() {
	closeAll(f.files)
	f.files = nil
}

// wire sends and receives frames over a SEQPACKET connection.
type wire struct {
	c *net.UnixConn

	wmu sync.Mutex
	rbf []byte
	oob []byte
}

func newWire(c *net.UnixConn) *wire {
	return &wire{c: c, rbf: make([]byte, frameHeader+maxInline), oob: make([]byte, unix.CmsgSpace(4*maxFiles))}
}

// send sends a frame; the descriptors in it stay the caller's.
func (w *wire) send(f frame) error {
	fds := make([]int, 0, len(f.files)+1)
	for _, x := range f.files {
		fds = append(fds, fdOf(x))
	}
	body := f.body
	if len(body) > maxInline {
		m, err := linux.SealedFile("frame", body)
		if err != nil {
			return err
		}
		defer func() { _ = m.Close() }()
		fds = append(fds, fdOf(m))
		f.flags |= flagMemfd
		body = nil
	}
	b := make([]byte, frameHeader, frameHeader+len(body))
	binary.LittleEndian.PutUint16(b, frameMagic)
	binary.LittleEndian.PutUint16(b[2:], protocolVersion)
	binary.LittleEndian.PutUint16(b[4:], uint16(f.op))
	binary.LittleEndian.PutUint32(b[8:], f.flags)
	binary.LittleEndian.PutUint32(b[12:], uint32(len(f.body)))
	binary.LittleEndian.PutUint64(b[16:], f.id)
	b = append(b, body...)
	var oob []byte
	if len(fds) > 0 {
		oob = unix.UnixRights(fds...)
	}
	w.wmu.Lock()
	defer w.wmu.Unlock()
	_, _, err := w.c.WriteMsgUnix(b, oob, nil)
	return err
}

var errTruncated = errors.New("message was cut")

// recv receives a frame; one caller at a time.
func (w *wire) recv() (frame, error) {
	n, oobn, flags, _, err := w.c.ReadMsgUnix(w.rbf, w.oob)
	if err != nil {
		return frame{}, err
	}
	files, err := receivedFiles(w.oob[:oobn])
	f := frame{files: files}
	if err == nil && flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0 {
		err = errTruncated
	}
	if err == nil {
		err = f.parse(w.rbf[:n])
	}
	if err != nil {
		f.close()
		return frame{}, err
	}
	return f, nil
}

func receivedFiles(oob []byte) (files []*os.File, err error) {
	fds, err := linux.Received(oob)
	for _, fd := range fds {
		files = append(files, os.NewFile(uintptr(fd), "received"))
	}
	return files, err
}

func errVersion(v uint16) error {
	return fmt.Errorf("protocol version %d, this program speaks %d", v, protocolVersion)
}

func (f *frame) parse(b []byte) error {
	if len(b) == 0 {
		return net.ErrClosed // SEQPACKET has no other end of file
	}
	if len(b) < frameHeader || binary.LittleEndian.Uint16(b) != frameMagic {
		return errors.New("not a frame of the hold protocol")
	}
	f.version = binary.LittleEndian.Uint16(b[2:])
	f.op = op(binary.LittleEndian.Uint16(b[4:]))
	if f.version != protocolVersion && !f.op.forEver() {
		return errVersion(f.version)
	}
	f.flags = binary.LittleEndian.Uint32(b[8:])
	size := int(binary.LittleEndian.Uint32(b[12:]))
	f.id = binary.LittleEndian.Uint64(b[16:])
	if f.flags&flagMemfd == 0 {
		if size != len(b)-frameHeader {
			return errTruncated
		}
		f.body = append([]byte(nil), b[frameHeader:]...)
		return nil
	}
	if len(f.files) == 0 || size > maxBody {
		return errTruncated
	}
	last := f.files[len(f.files)-1]
	f.files = f.files[:len(f.files)-1]
	defer func() { _ = last.Close() }()
	f.body = make([]byte, size)
	_, err := last.ReadAt(f.body, 0)
	return err
}

// wireError is an error on its way.
type wireError struct {
	Class      dsec.Class
	Op, Object string
	Text       string
}

func encodeError(err error) []byte {
	we := wireError{Class: dsec.ClassOf(err), Text: err.Error()}
	if e, ok := errors.AsType[*dsec.Error](err); ok {
		we = wireError{Class: e.Class, Op: e.Op, Object: e.Object}
		if e.Err != nil {
			we.Text = e.Err.Error()
		}
	}
	b, _ := json.Marshal(we)
	return b
}

func decodeError(b []byte) error {
	var we wireError
	if err := json.Unmarshal(b, &we); err != nil {
		return dsec.E(dsec.Internal, "read error", "", err)
	}
	var cause error
	if we.Text != "" {
		cause = errors.New(we.Text)
	}
	return dsec.E(we.Class, we.Op, we.Object, cause)
}

// raw is a string of bytes that JSON must not change: text that is not UTF-8
// travels in base64 behind a NUL, which no argument can hold.
type raw string

const rawMark = "\x00b64:"

func (r raw) MarshalJSON() ([]byte, error) {
	if utf8.ValidString(string(r)) && !strings.HasPrefix(string(r), rawMark) {
		return json.Marshal(string(r))
	}
	return json.Marshal(rawMark + base64.StdEncoding.EncodeToString([]byte(r)))
}

func (r *raw) UnmarshalJSON(b []byte) error {
	var s string
	if err := json.Unmarshal(b, &s); err != nil {
		return err
	}
	if rest, ok := strings.CutPrefix(s, rawMark); ok {
		d, err := base64.StdEncoding.DecodeString(rest)
		*r = raw(d)
		return err
	}
	*r = raw(s)
	return nil
}

func toRaw(s []string) []raw {
	r := make([]raw, len(s))
	for i := range s {
		r[i] = raw(s[i])
	}
	return r
}

func fromRaw(r []raw) []string {
	if r == nil {
		return nil
	}
	s := make([]string, len(r))
	for i := range r {
		s[i] = string(r[i])
	}
	return s
}

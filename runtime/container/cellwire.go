package container

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"path"
	"strings"
	"syscall"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/runtime"
)

// What is said on the cell socket; docs/formats/function.md.
const (
	cellMagic   = 0x314c4344
	cellSetup   = 1
	cellCall    = 2
	cellRequest = 128 << 20 // most bytes of a request

	setupLoopback    = 1
	setupInterpreter = 2
	callInterpreted  = 4

	cellFrame     = 64 << 10  // most bytes of a frame's body
	cellInodes    = 1 << 16   // of a cell's files
	exitTimedOut  = 1         // flags of a result
	exitOutput    = 2 | 4     // of stdout, of stderr
	exitNoStart   = 8         //
	exitSize      = 40        // bytes of a result
	cellMaxFiles  = 20_000    // that come back
	cellMaxSecond = 1_000_000 // of CPU time
)

// cellRequester builds a request.
type cellRequester struct{ b []byte }

func newCellRequest(kind uint32) *cellRequester {
	r := &cellRequester{b: make([]byte, 0, 1024)}
	r.u32(cellMagic)
	r.u32(0) // its size
	r.u32(kind)
	return r
}

func (r *cellRequester) u32(v uint32) { r.b = binary.LittleEndian.AppendUint32(r.b, v) }
func (r *cellRequester) u64(v uint64) { r.b = binary.LittleEndian.AppendUint64(r.b, v) }

// blob writes bytes with their number before and a 0 behind.
func (r *cellRequester) blob(b []byte) {
	r.u32(uint32(len(b)))
	r.b = append(append(r.b, b...), 0)
}

func (r *cellRequester) text(s string) {
	r.u32(uint32(len(s)))
	r.b = append(append(r.b, s...), 0)
}

func (r *cellRequester) list(l []string) {
	r.u32(uint32(len(l)))
	for _, s := range l {
		r.text(s)
	}
}

// done sets the size.
func (r *cellRequester) done() ([]byte, error) {
	if len(r.b) > cellRequest {
		return nil, dsec.Errorf(dsec.Invalid, "run in cell", "", "files, input and code have more than %d bytes", cellRequest)
	}
	binary.LittleEndian.PutUint32(r.b[4:], uint32(len(r.b)-8))
	return r.b, nil
}

func encodeCellSetup(s runtime.CellSpec, task, interpreter []byte) ([]byte, error) {
	r := newCellRequest(cellSetup)
	var flags uint32
	if s.Loopback {
		flags |= setupLoopback
	}
	i := runtime.Interpreter{}
	if s.Interpreter != nil {
		flags |= setupInterpreter
		i = *s.Interpreter
	}
	r.u32(flags)
	r.u32(s.UID)
	r.u32(s.GID)
	r.blob(task)
	r.blob(interpreter)
	r.list(i.Programs)
	args := i.Args
	if len(i.Programs) > 0 {
		args = append([]string{i.Programs[0]}, args...)
	}
	r.list(args)
	r.list(i.Env)
	return r.done()
}

func encodeCellRun(c runtime.CellRun) ([]byte, error) {
	r := newCellRequest(cellCall)
	var flags uint32
	compile := runtime.CellCommand{}
	if c.Compile != nil {
		compile = *c.Compile
	}
	if len(c.Command.Argv) == 0 {
		flags |= callInterpreted
	}
	r.u32(flags)
	for _, k := range []runtime.CellCommand{compile, c.Command} {
		r.u64(uint64(k.Wall.Microseconds()))
		r.u64(uint64(min(int64((k.CPU+time.Second-1)/time.Second), cellMaxSecond)))
	}
	r.u64(uint64(c.Output))
	r.u64(uint64(c.Disk))
	r.u64(cellInodes)
	r.u64(uint64(c.Back))
	for _, k := range []runtime.CellCommand{compile, c.Command} {
		r.list(candidates(k.Argv, c.Env))
		r.list(k.Argv)
	}
	r.list(c.Env)
	r.list(c.Outputs)
	r.blob(c.Stdin)
	r.blob(c.Payload)
	r.u32(uint32(len(c.Files)))
	for _, f := range c.Files {
		if !localPath(f.Path) {
			return nil, dsec.Errorf(dsec.Invalid, "run in cell", dsec.Quote(f.Path), "a file's path is relative, clean and stays below the working directory")
		}
		r.u32(f.Mode)
		r.text(f.Path)
		r.blob(f.Data)
	}
	return r.done()
}

func localPath(p string) bool {
	return p != "" && p != "." && len(p) < 1024 && path.Clean(p) == p && !path.IsAbs(p) && p != ".." && !strings.HasPrefix(p, "../") && !strings.Contains(p, "\x00")
}

// candidates are where a program may be, as execvp looks.
func candidates(argv, env []string) (list []string) {
	if len(argv) == 0 {
		return nil
	}
	if strings.Contains(argv[0], "/") {
		return argv[:1]
	}
	search := "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
	for _, kv := range env {
		if v, ok := strings.CutPrefix(kv, "PATH="); ok {
			search = v
		}
	}
	for dir := range strings.SplitSeq(search, ":") {
		if len(list) == 60 {
			break
		}
		list = append(list, path.Join(dir, argv[0]))
	}
	return list
}

// cellReader takes apart what the server says.
type cellReader struct {
	r    io.Reader
	head [8]byte
	body []byte
}

// next is one frame; its body is valid until the next.
func (c *cellReader) next() (kind byte, body []byte, err error) {
	if _, err := io.ReadFull(c.r, c.head[:]); err != nil {
		return 0, nil, err
	}
	n := binary.LittleEndian.Uint32(c.head[4:])
	if n > cellFrame+cellFrame/16 {
		return 0, nil, dsec.Errorf(dsec.Corrupt, "read from cell", "", "a frame of %d bytes", n)
	}
	if cap(c.body) < int(n) {
		c.body = make([]byte, n)
	}
	c.body = c.body[:n]
	_, err = io.ReadFull(c.r, c.body)
	return c.head[0], c.body, err
}

// cellStep is an error of the cell's maker.
type cellStep struct {
	step  string
	errno syscall.Errno
}

func (e *cellStep) Error() string { return e.step + ": " + e.errno.Error() }
func (e *cellStep) Unwrap() error { return e.errno }

func decodeCellStep(b []byte) error {
	if len(b) < 4 {
		return io.ErrUnexpectedEOF
	}
	return &cellStep{string(b[4:]), syscall.Errno(binary.LittleEndian.Uint32(b))}
}

// cellCollector gathers what is said of one call.
type cellCollector struct {
	end    runtime.CellEnd
	out    bytes.Buffer
	err    bytes.Buffer
	most   int64 // of each
	back   int64 // bytes of files that may still come
	failed error
	all    bool // there is no more to come of the call
}

// add takes a frame and reports whether it was the last one: of what the call came to, or of a
// cell that has ended before.
func (c *cellCollector) add(kind byte, b []byte) (last bool, err error) {
	switch kind {
	case 'o', 'e':
		into := &c.out
		if kind == 'e' {
			into = &c.err
		}
		if int64(into.Len()+len(b)) > 2*c.most { // a compiler's is counted of its own
			return false, dsec.Errorf(dsec.Corrupt, "read from cell", "", "more output than was asked for")
		}
		into.Write(b)
	case 'r':
		return false, c.result(b)
	case 'f':
		if len(b) < 5 || len(c.end.Files) >= cellMaxFiles {
			return false, dsec.Errorf(dsec.Corrupt, "read from cell", "", "not a file")
		}
		c.end.Files = append(c.end.Files, runtime.CellFile{Mode: binary.LittleEndian.Uint32(b) & 0o777, Path: string(b[4:])})
	case 'd':
		n := len(c.end.Files)
		if c.back -= int64(len(b)); n == 0 || c.back < 0 {
			return false, dsec.Errorf(dsec.Corrupt, "read from cell", "", "more bytes of files than was asked for")
		}
		c.end.Files[n-1].Data = append(c.end.Files[n-1].Data, b...)
	case 'g':
		c.end.FilesLeftOut = len(b) == 4 && b[0] != 0
		c.all = true
		return true, nil
	case 'x':
		if c.failed == nil {
			c.failed = decodeCellStep(b)
		}
	case 'C':
		if len(b) != 4 {
			return false, io.ErrUnexpectedEOF
		}
		return true, nil
	default:
		return false, dsec.Errorf(dsec.Corrupt, "read from cell", "", "unknown frame %q", kind)
	}
	return false, nil
}

func (c *cellCollector) result(b []byte) error {
	if len(b) != exitSize {
		return dsec.Errorf(dsec.Corrupt, "read from cell", "", "a result of %d bytes", len(b))
	}
	u32 := func(i int) uint32 { return binary.LittleEndian.Uint32(b[i:]) }
	us := func(i int) time.Duration {
		return time.Duration(min(binary.LittleEndian.Uint64(b[i:]), 1<<50)) * time.Microsecond
	}
	status, flags := u32(4), u32(8)
	e := &runtime.CellExit{TimedOut: flags&exitTimedOut != 0, Output: flags&exitOutput != 0, Wall: us(16), CPU: us(24),
		Largest: int64(min(binary.LittleEndian.Uint64(b[32:]), 1<<50)) << 10}
	w := syscall.WaitStatus(status)
	switch {
	case flags&exitNoStart != 0:
		e.Start = syscall.Errno(status)
	case w.Signaled():
		e.Signal = int(w.Signal())
		e.Code = 128 + e.Signal
	default:
		e.Code = w.ExitStatus() & 0xff
	}
	switch u32(0) {
	case 0:
		c.end.Compile = e
	case 1:
		c.end.Command = e
	default:
		return fmt.Errorf("result of run %d", u32(0))
	}
	return nil
}

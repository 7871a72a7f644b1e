package files

import (
	"encoding/binary"
	"strings"
	"time"

	"github.com/opendsec/dsec"
)

// opCode names an operation on the wire.
type opCode byte

const (
	callStat opCode = 1 + iota
	callList
	callRead
	callWrite
	callMkdir
	callMove
	callRemove
	callSetAttr
	callDownload
	callUpload
	callWatch
)

var opNames = map[opCode]string{callStat: opStat, callList: opList, callRead: opRead, callWrite: opWrite, callMkdir: opMkdir,
	callMove: opMove, callRemove: opRemove, callSetAttr: opSetAttr, callDownload: opDownload, callUpload: opUpload, callWatch: opWatch}

// takesBody reports whether the client sends one.
func (o opCode) takesBody() bool { return o == callWrite || o == callUpload }

// call is a request: the parameters of all operations, unused ones empty.
type call struct {
	op     opCode
	flag   bool // follow, parents, recursive
	append bool
	depth  uint32
	mode   *uint32
	uid    *uint32
	gid    *uint32
	mtime  *time.Time
	offset int64
	length int64         // also the most bytes of a tree
	limit  time.Duration // until the deadline; 0: none
	path   string
	to     string // also the digest of a write
	globs  []string
}

func (c *call) encode() []byte {
	var e encoder
	e.u8(byte(c.op))
	e.bool(c.flag)
	e.bool(c.append)
	e.u32(c.depth)
	e.optional(c.mode)
	e.optional(c.uid)
	e.optional(c.gid)
	e.bool(c.mtime != nil)
	if c.mtime != nil {
		e.time(*c.mtime)
	}
	e.i64(c.offset)
	e.i64(c.length)
	e.i64(int64(c.limit))
	e.str(c.path)
	e.str(c.to)
	e.u32(uint32(len(c.globs)))
	for _, g := range c.globs {
		e.str(g)
	}
	return e.b
}

func decodeCall(b []byte) (*call, error) {
	d := decoder{b: b}
	c := &call{op: opCode(d.u8()), flag: d.bool(), append: d.bool(), depth: d.u32(), mode: d.optional(), uid: d.optional(), gid: d.optional()}
	if d.bool() {
		t := d.time()
		c.mtime = &t
	}
	c.offset, c.length, c.limit = d.i64(), d.i64(), time.Duration(d.i64())
	c.path, c.to = d.str(), d.str()
	n := d.u32()
	if n > maxGlobs {
		return nil, errProtocol
	}
	for range n {
		c.globs = append(c.globs, d.str())
	}
	if opNames[c.op] == "" || c.limit < 0 {
		return nil, errProtocol
	}
	return c, d.end()
}

// kinds on the wire, from 1.
var kinds = []Kind{File, Dir, Symlink, Other}

func (e *encoder) info(i *Info) {
	for n, k := range kinds {
		if i.Kind == k {
			e.u8(byte(n + 1))
		}
	}
	e.i64(i.Size)
	e.u32(i.Mode)
	e.u32(i.UID)
	e.u32(i.GID)
	e.time(i.MTime)
	e.i64(int64(i.Links))
	e.str(i.Path)
	e.str(i.Owner)
	e.str(i.Group)
	e.str(i.Target)
}

func (d *decoder) info() (i Info) {
	k := int(d.u8())
	if k < 1 || k > len(kinds) {
		d.bad = true
		return i
	}
	i.Kind, i.Size, i.Mode, i.UID, i.GID, i.MTime, i.Links = kinds[k-1], d.i64(), d.u32(), d.u32(), d.u32(), d.time(), uint64(d.i64())
	i.Path, i.Owner, i.Group, i.Target = d.str(), d.str(), d.str(), d.str()
	return i
}

var ops = []Op{OpCreate, OpWrite, OpRemove, OpAttr, OpLost, OpWatching}

func (e *encoder) change(c Change) {
	for n, o := range ops {
		if c.Op == o {
			e.u8(byte(n + 1))
		}
	}
	e.str(c.Path)
}

func (d *decoder) change() (c Change) {
	k := int(d.u8())
	if k < 1 || k > len(ops) {
		d.bad = true
		return c
	}
	c.Op, c.Path = ops[k-1], d.str()
	return c
}

// response is the end of a request.
type response struct {
	err  error
	info *Info // of Stat and Write
}

const maxErrorText = 1 << 10

func (r *response) encode() []byte {
	var e encoder
	e.bool(r.err != nil)
	if r.err != nil {
		op, object, cause := "", "", r.err.Error()
		if de, ok := r.err.(*dsec.Error); ok {
			op, object, cause = de.Op, de.Object, ""
			if de.Err != nil {
				cause = de.Err.Error()
			}
		}
		for _, s := range []string{string(dsec.ClassOf(r.err)), op, object, cause} {
			e.str(s[:min(len(s), maxErrorText)])
		}
		return e.b
	}
	e.bool(r.info != nil)
	if r.info != nil {
		e.info(r.info)
	}
	return e.b
}

func decodeResponse(b []byte) (*response, error) {
	d := decoder{b: b}
	r := &response{}
	switch {
	case d.bool():
		r.err = d.failure()
	case d.bool():
		i := d.info()
		r.info = &i
	}
	return r, d.end()
}

// failure is an error from the other side; its class must be one there is and
// its text is cleaned of control characters.
func (d *decoder) failure() error {
	e := &dsec.Error{Class: dsec.Internal}
	class := dsec.Class(d.str())
	for _, c := range dsec.Classes {
		if c == class {
			e.Class = c
		}
	}
	e.Op, e.Object = printable(d.str()), printable(d.str())
	if cause := printable(d.str()); cause != "" {
		e.Err = remoteCause(cause)
	}
	return e
}

type remoteCause string

func (r remoteCause) Error() string { return string(r) }

func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return '?'
		}
		return r
	}, strings.ToValidUTF8(s[:min(len(s), maxErrorText)], "?"))
}

// encoder appends fixed-size big-endian numbers and strings with their length.
type encoder struct{ b []byte }

func (e *encoder) u8(v byte)    { e.b = append(e.b, v) }
func (e *encoder) u32(v uint32) { e.b = binary.BigEndian.AppendUint32(e.b, v) }
func (e *encoder) i64(v int64)  { e.b = binary.BigEndian.AppendUint64(e.b, uint64(v)) }

func (e *encoder) bool(v bool) {
	if v {
		e.u8(1)
	} else {
		e.u8(0)
	}
}

func (e *encoder) str(s string) {
	e.u32(uint32(len(s)))
	e.b = append(e.b, s...)
}

func (e *encoder) optional(v *uint32) {
	e.bool(v != nil)
	if v != nil {
		e.u32(*v)
	}
}

func (e *encoder) time(t time.Time) {
	e.i64(t.Unix())
	e.u32(uint32(t.Nanosecond()))
}

// decoder reads what an encoder wrote; after the first thing that does not fit
// everything is zero and end errs.
type decoder struct {
	b   []byte
	bad bool
}

func (d *decoder) take(n int) []byte {
	if d.bad || n < 0 || n > len(d.b) {
		d.bad = true
		return make([]byte, min(max(n, 0), 8))
	}
	p := d.b[:n]
	d.b = d.b[n:]
	return p
}

func (d *decoder) u8() byte    { return d.take(1)[0] }
func (d *decoder) u32() uint32 { return binary.BigEndian.Uint32(d.take(4)) }
func (d *decoder) i64() int64  { return int64(binary.BigEndian.Uint64(d.take(8))) }

func (d *decoder) bool() bool {
	v := d.u8()
	d.bad = d.bad || v > 1
	return v == 1
}

func (d *decoder) str() string {
	n := d.u32()
	if n > maxPayload {
		d.bad = true
	}
	if d.bad {
		return ""
	}
	p := d.take(int(n))
	if d.bad {
		return ""
	}
	return string(p)
}

func (d *decoder) optional() *uint32 {
	if !d.bool() {
		return nil
	}
	v := d.u32()
	return &v
}

func (d *decoder) time() time.Time {
	sec, ns := d.i64(), d.u32()
	if ns >= 1e9 || sec > 1<<40 || sec < -1<<40 {
		d.bad = true
		return time.Time{}
	}
	return time.Unix(sec, int64(ns)).UTC()
}

func (d *decoder) end() error {
	if d.bad || len(d.b) != 0 {
		return errProtocol
	}
	return nil
}

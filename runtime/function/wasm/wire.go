package wasm

import (
	"encoding/binary"
	"errors"
	"io"
	"time"
)

// What host and worker say to each other, see docs/formats/function.md: frames of a
// length and a body, of which either side bounds the length.
const (
	maxFrame = 80 << 20

	saysCall   = 1 // host
	saysCancel = 2
	saysTry    = 6 // compile only
	saysResult = 3 // worker
	saysNeed   = 4 // the module of a call
	saysReady  = 5
)

// How a call ended in the worker.
const (
	endExit   = 0 // by itself, Code says how
	endTrap   = 1
	endTime   = 2
	endOutput = 3
	endMemory = 4
	endModule = 5 // it is no module, or asks for what there is not
	endCancel = 6
	endFuel   = 7
)

// request is a call on its way to the worker.
type request struct {
	id     uint64
	try    bool     // the module is to be compiled, and that is all
	digest [32]byte // of the module
	module []byte   // none: the worker may have it
	memory uint64
	fuel   uint64 // 0: instructions are not counted
	wall   time.Duration
	output uint64
	args   []string
	env    []string // "K=V"
	files  []file
	stdin  []byte
}

type file struct {
	path string
	mode uint32
	data []byte
}

// answer is what the worker says of a call.
type answer struct {
	id             uint64
	says           byte
	end            byte
	code           uint32
	detail         string
	stdout, stderr []byte
	truncated      bool
	wall           time.Duration
	memory         uint64
	fuel           uint64 // used
}

var errFrame = errors.New("not a frame of the module protocol")

type builder struct{ b []byte }

func newBuilder(says byte, id uint64) *builder {
	w := &builder{b: make([]byte, 4, 256)}
	w.b = append(w.b, says)
	w.u64(id)
	return w
}

func (w *builder) u64(v uint64)   { w.b = binary.LittleEndian.AppendUint64(w.b, v) }
func (w *builder) bytes(p []byte) { w.u64(uint64(len(p))); w.b = append(w.b, p...) }
func (w *builder) text(s string)  { w.u64(uint64(len(s))); w.b = append(w.b, s...) }
func (w *builder) texts(l []string) {
	w.u64(uint64(len(l)))
	for _, s := range l {
		w.text(s)
	}
}

func (w *builder) done() []byte {
	binary.LittleEndian.PutUint32(w.b, uint32(len(w.b)-4))
	return w.b
}

func (r *request) encode() []byte {
	says := byte(saysCall)
	if r.try {
		says = saysTry
	}
	w := newBuilder(says, r.id)
	w.bytes(r.digest[:])
	w.bytes(r.module)
	w.u64(r.memory)
	w.u64(r.fuel)
	w.u64(uint64(r.wall))
	w.u64(r.output)
	w.texts(r.args)
	w.texts(r.env)
	w.u64(uint64(len(r.files)))
	for _, f := range r.files {
		w.text(f.path)
		w.u64(uint64(f.mode))
		w.bytes(f.data)
	}
	w.bytes(r.stdin)
	return w.done()
}

func (a *answer) encode() []byte {
	w := newBuilder(a.says, a.id)
	if a.says != saysResult {
		return w.done()
	}
	w.u64(uint64(a.end))
	w.u64(uint64(a.code))
	w.text(a.detail)
	w.bytes(a.stdout)
	w.bytes(a.stderr)
	var truncated uint64
	if a.truncated {
		truncated = 1
	}
	w.u64(truncated)
	w.u64(uint64(a.wall))
	w.u64(a.memory)
	w.u64(a.fuel)
	return w.done()
}

// parser reads from the front; the first thing that is not there is its error.
type parser struct {
	b   []byte
	err error
}

func (p *parser) u64() uint64 {
	if len(p.b) < 8 {
		p.b, p.err = nil, errFrame
		return 0
	}
	v := binary.LittleEndian.Uint64(p.b)
	p.b = p.b[8:]
	return v
}

// bytes are valid as long as the frame is.
func (p *parser) bytes() []byte {
	n := p.u64()
	if n > uint64(len(p.b)) {
		p.b, p.err = nil, errFrame
		return nil
	}
	v := p.b[:n:n]
	p.b = p.b[n:]
	return v
}

func (p *parser) text() string { return string(p.bytes()) }

// count is the number of what follows, each of which has least bytes.
func (p *parser) count(least uint64) uint64 {
	n := p.u64()
	if n > uint64(len(p.b))/least {
		p.b, p.err = nil, errFrame
		return 0
	}
	return n
}

func (p *parser) texts() (l []string) {
	for range p.count(8) {
		l = append(l, p.text())
	}
	return l
}

// end is the error, also if anything is left.
func (p *parser) end() error {
	if p.err == nil && len(p.b) > 0 {
		p.err = errFrame
	}
	return p.err
}

func decodeHead(b []byte) (says byte, id uint64, rest []byte, err error) {
	if len(b) < 9 {
		return 0, 0, nil, errFrame
	}
	return b[0], binary.LittleEndian.Uint64(b[1:]), b[9:], nil
}

func decodeRequest(id uint64, b []byte) (*request, error) {
	p := &parser{b: b}
	r := &request{id: id}
	if copy(r.digest[:], p.bytes()) != len(r.digest) {
		return nil, errFrame
	}
	r.module = p.bytes()
	r.memory, r.fuel, r.wall, r.output = p.u64(), p.u64(), time.Duration(min(p.u64(), 1<<62)), p.u64()
	r.args, r.env = p.texts(), p.texts()
	for range p.count(24) {
		f := file{path: p.text(), mode: uint32(p.u64())}
		f.data = p.bytes()
		r.files = append(r.files, f)
	}
	r.stdin = p.bytes()
	return r, p.end()
}

func decodeAnswer(b []byte) (*answer, error) {
	says, id, rest, err := decodeHead(b)
	if err != nil {
		return nil, err
	}
	a := &answer{id: id, says: says}
	if says != saysResult {
		return a, nil
	}
	p := &parser{b: rest}
	a.end, a.code, a.detail = byte(p.u64()), uint32(p.u64()), p.text()
	a.stdout, a.stderr = p.bytes(), p.bytes()
	a.truncated, a.wall, a.memory, a.fuel = p.u64() != 0, time.Duration(min(p.u64(), 1<<62)), p.u64(), p.u64()
	return a, p.end()
}

// readFrame reads one into memory of its own.
func readFrame(r io.Reader) ([]byte, error) {
	var head [4]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return nil, err
	}
	n := binary.LittleEndian.Uint32(head[:])
	if n > maxFrame {
		return nil, errFrame
	}
	b := make([]byte, n)
	_, err := io.ReadFull(r, b)
	return b, err
}

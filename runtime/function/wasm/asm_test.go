package wasm

import (
	"encoding/binary"
	"strings"
)

// A few words of assembly for the tests: a module that imports what it names of WASI,
// has one memory and one function, which it exports as _start.

const (
	i32 = 0x7f
	i64 = 0x7e
)

type imported struct {
	from, name      string
	params, results []byte
}

var (
	fdWrite  = imported{"wasi_snapshot_preview1", "fd_write", []byte{i32, i32, i32, i32}, []byte{i32}}
	fdRead   = imported{"wasi_snapshot_preview1", "fd_read", []byte{i32, i32, i32, i32}, []byte{i32}}
	procExit = imported{"wasi_snapshot_preview1", "proc_exit", []byte{i32}, nil}
	pathOpen = imported{"wasi_snapshot_preview1", "path_open", []byte{i32, i32, i32, i32, i32, i64, i64, i32, i32}, []byte{i32}}
)

func leb(v uint64) (b []byte) {
	for {
		c := byte(v & 0x7f)
		if v >>= 7; v == 0 {
			return append(b, c)
		}
		b = append(b, c|0x80)
	}
}

// sleb is of a constant.
func sleb(v int64) (b []byte) {
	for {
		c := byte(v & 0x7f)
		v >>= 7
		if v == 0 && c&0x40 == 0 || v == -1 && c&0x40 != 0 {
			return append(b, c)
		}
		b = append(b, c|0x80)
	}
}

func vec(items ...[]byte) []byte {
	b := leb(uint64(len(items)))
	for _, i := range items {
		b = append(b, i...)
	}
	return b
}

func sized(b []byte) []byte  { return append(leb(uint64(len(b))), b...) }
func named(s string) []byte  { return sized([]byte(s)) }
func konst(v int64) []byte   { return append([]byte{0x41}, sleb(v)...) }
func konst64(v int64) []byte { return append([]byte{0x42}, sleb(v)...) }
func call(fn uint64) []byte  { return append([]byte{0x10}, leb(fn)...) }
func load(at int64) []byte   { return append(konst(at), 0x28, 2, 0) }
func join(p ...[]byte) (b []byte) {
	for _, x := range p {
		b = append(b, x...)
	}
	return b
}

var (
	drop        = []byte{0x1a}
	unreachable = []byte{0x00}
	again       = []byte{0x0c, 0} // br 0
	grow        = []byte{0x40, 0}
)

// loop repeats for ever what ends with again.
func loop(body ...[]byte) []byte { return join([]byte{0x03, 0x40}, join(body...), []byte{0x0b}) }

func when(body ...[]byte) []byte { return join([]byte{0x04, 0x40}, join(body...), []byte{0x0b}) }

// assemble makes a module; data are at 0.
func assemble(pages uint64, data []byte, imports []imported, body ...[]byte) []byte {
	var types, imps [][]byte
	for i, im := range imports {
		types = append(types, join([]byte{0x60}, sized(im.params), sized(im.results)))
		imps = append(imps, join(named(im.from), named(im.name), []byte{0}, leb(uint64(i))))
	}
	types = append(types, []byte{0x60, 0, 0})
	n := uint64(len(imports))
	section := func(id byte, b []byte) []byte { return append([]byte{id}, sized(b)...) }
	return join([]byte("\x00asm\x01\x00\x00\x00"),
		section(1, vec(types...)), section(2, vec(imps...)), section(3, vec(leb(n))), section(5, vec(join([]byte{0}, leb(pages)))),
		section(7, vec(join(named("_start"), []byte{0}, leb(n)), join(named("memory"), []byte{2, 0}))),
		section(10, vec(sized(join([]byte{0}, join(body...), []byte{0x0b})))),
		section(11, vec(join([]byte{0}, konst(0), []byte{0x0b}, sized(data)))))
}

// with has one more section, in its place.
func with(module []byte, id byte, body []byte) []byte {
	const order = "\x01\x02\x03\x04\x05\x06\x07\x08\x09\x0c\x0a\x0b"
	out, rest, done := module[:8:8], module[8:], false
	put := func() { out, done = join(out, []byte{id}, sized(body)), true }
	for len(rest) > 0 {
		if !done && strings.IndexByte(order, rest[0]) > strings.IndexByte(order, id) {
			put()
		}
		n, size := binary.Uvarint(rest[1:])
		end := 1 + size + int(n)
		out, rest = append(out, rest[:end]...), rest[end:]
	}
	if !done {
		put()
	}
	return out
}

// iovec is the place and size of a buffer.
func iovec(at, size uint32) []byte {
	return binary.LittleEndian.AppendUint32(binary.LittleEndian.AppendUint32(nil, at), size)
}

// Hello prints a line.
func hello(text string) []byte {
	return assemble(1, append(iovec(16, uint32(len(text))), append(make([]byte, 8), text...)...), []imported{fdWrite},
		konst(1), konst(0), konst(1), konst(8), call(0), drop)
}

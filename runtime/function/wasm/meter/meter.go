// Package meter makes a WebAssembly module count what it executes, and end when that is
// more than it was given: fuel, for an engine that has none.
//
// Every instruction costs 1, but for block, loop, else, end and nop, which cost nothing;
// those that move many bytes or entries of a table (memory.copy, memory.fill,
// memory.init, table.copy, table.fill, table.init, table.grow) cost 1 more for each
// whole 16 of them. Code without a jump in it is paid for as a whole when it is entered.
// Whether anything is left is looked at where a function or a round of a loop begins,
// and before many bytes are moved: what a module uses can be over its fuel by the code
// of one function. What it used is exact up to the code without a jump in which it ended. The
// same module with the same input always uses the same. A call of the engine costs 1, whatever
// it does.
//
// What a module does is otherwise as before, but that its start function has to be called.
package meter

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
)

// What a metered module exports beside its own.
const (
	Fuel  = "dsec.fuel"  // a global of i64: set it before anything runs; below 0: it was not enough
	Start = "dsec.start" // the start function, if the module had one
)

// The numbers of the sections that are looked at.
const (
	idType     = 1
	idImport   = 2
	idFunction = 3
	idTable    = 4
	idMemory   = 5
	idGlobal   = 6
	idExport   = 7
	idStart    = 8
	idElement  = 9
	idCode     = 10
	idData     = 11
)

// Sections come in this order; that of the count of data is older than its number.
var order = []byte{1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 10, 11}

const header = "\x00asm\x01\x00\x00\x00"

var (
	errShort = errors.New("it ends too early")
	errCount = errors.New("it says that there are more than it has bytes")
)

type section struct {
	id   byte
	body []byte
}

// module is one whose counter is being put in.
type module struct {
	sections []section
	types    uint64 // how many it has
	funcs    uint64 // with those that it imports
	globals  uint64
	imported uint64 // functions
	others   uint64 // that it imports and are no functions
}

// Inject returns the module b with a counter. It is an error if b exports what a metered
// module does, has something beyond version 2 of the specification, or is so full of jumps
// that it grows to more than it may. All else that is wrong with it is left to the engine: what
// is put in could make valid what was not, but not what reaches the counter.
func Inject(b []byte) ([]byte, error) {
	m, err := split(b)
	if err != nil {
		return nil, err
	}
	if err := m.count(); err != nil {
		return nil, err
	}
	entry, err := m.exports()
	if err != nil {
		return nil, err
	}
	if err := m.bodies(); err != nil {
		return nil, err
	}
	if size := m.size(); size > growth*(len(b)+1<<10) {
		return nil, fmt.Errorf("counting makes %d bytes of its %d: it has more jumps than a program", size, len(b))
	}
	m.add(idType, []byte{0x60, 1, typeI32, 1, typeI32})
	m.add(idFunction, unsigned(nil, m.types))
	m.add(idGlobal, []byte{typeI64, 1, opI64Const, 0, opEnd})
	m.add(idExport, entry...)
	m.add(idCode, m.mover())
	return m.join(), nil
}

// growth is how many times as large a module may become. Those of compilers do not become twice
// as large.
const growth = 3

func (m *module) size() (n int) {
	for _, s := range m.sections {
		n += len(s.body)
	}
	return n
}

func split(b []byte) (*module, error) {
	if !bytes.HasPrefix(b, []byte(header)) {
		return nil, errors.New("it does not begin like a module of version 1")
	}
	m, r := &module{}, &reader{b: b, at: len(header)}
	last := -1
	for r.at < len(b) {
		s := section{id: r.byte()}
		s.body = r.take(r.u32())
		if r.err != nil {
			return nil, fmt.Errorf("section %d: %w", s.id, r.err)
		}
		if s.id != 0 {
			i := slices.Index(order, s.id)
			if i <= last {
				return nil, fmt.Errorf("section %d: it is not known, or not there", s.id)
			}
			last = i
		}
		m.sections = append(m.sections, s)
	}
	return m, nil
}

// find is a section's place, or where it would be.
func (m *module) find(id byte) (int, bool) {
	for i, s := range m.sections {
		if s.id == id {
			return i, true
		}
		if s.id != 0 && slices.Index(order, s.id) > slices.Index(order, id) {
			return i, false
		}
	}
	return len(m.sections), false
}

// items opens a section that is a vector; none is an empty one.
func (m *module) items(id byte) (n uint64, r *reader) {
	i, ok := m.find(id)
	if !ok {
		return 0, &reader{}
	}
	r = &reader{b: m.sections[i].body}
	if n = r.u32(); n > uint64(len(r.rest())) { // the engine makes room for as many
		r.fail(errCount)
	}
	return n, r
}

// add appends to a section that is a vector.
func (m *module) add(id byte, entries ...[]byte) {
	i, ok := m.find(id)
	if !ok {
		m.sections = slices.Insert(m.sections, i, section{id, []byte{0}})
	}
	n, r := m.items(id)
	body := unsigned(nil, n+uint64(len(entries)))
	body = append(body, r.rest()...)
	m.sections[i].body = append(body, bytes.Join(entries, nil)...)
}

// count sets how much there is of what is numbered.
func (m *module) count() error {
	for _, id := range []byte{idType, idImport, idFunction, idTable, idMemory, idGlobal, idExport, idElement, idCode, idData} {
		n, r := m.items(id)
		switch id {
		case idType:
			m.types = n
		case idFunction:
			m.funcs = n
		case idGlobal:
			m.globals = n
		}
		if r.err != nil {
			return fmt.Errorf("section %d: %w", id, r.err)
		}
	}
	n, r := m.items(idImport)
	for range n {
		r.take(r.u32())
		r.take(r.u32())
		switch kind := r.byte(); kind {
		case 0:
			own(r, m.types, "type")
			m.funcs++
			m.imported++
			continue
		case 1:
			r.valueType()
			r.limits()
		case 2:
			r.limits()
		case 3:
			r.valueType()
			r.byte()
			m.globals++
		default:
			r.fail(fmt.Errorf("kind %d is not known", kind))
		}
		m.others++
		if r.err != nil {
			break
		}
	}
	if r.err != nil {
		return fmt.Errorf("imports: %w", r.err)
	}
	return nil
}

// exports takes the start section out, and returns what is exported more than before.
func (m *module) exports() ([][]byte, error) {
	n, r := m.items(idExport)
	for range n {
		name, kind, at := string(r.take(r.u32())), r.byte(), r.u32()
		if r.err != nil {
			return nil, fmt.Errorf("exports: %w", r.err)
		}
		switch {
		case name == Fuel || name == Start:
			return nil, fmt.Errorf("exports: the name %s is taken", name)
		case kind == 0 && at >= m.funcs || kind == 3 && at >= m.globals:
			return nil, fmt.Errorf("exports: what %q names is not there", name)
		}
	}
	entry := func(name string, kind byte, at uint64) []byte {
		return unsigned(append(append([]byte{byte(len(name))}, name...), kind), at)
	}
	more := [][]byte{entry(Fuel, 3, m.globals)}
	at, ok, err := m.start()
	if err != nil {
		return nil, err
	}
	if ok {
		i, _ := m.find(idStart)
		m.sections = slices.Delete(m.sections, i, i+1)
		more = append(more, entry(Start, 0, at))
	}
	return more, nil
}

// start is the number of the start function, if there is one.
func (m *module) start() (at uint64, ok bool, err error) {
	i, ok := m.find(idStart)
	if !ok {
		return 0, false, nil
	}
	r := &reader{b: m.sections[i].body}
	if at = r.u32(); r.err != nil || at >= m.funcs || len(r.rest()) > 0 {
		return 0, false, fmt.Errorf("start: there is no function %d", at)
	}
	return at, true, nil
}

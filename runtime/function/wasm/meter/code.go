package meter

import (
	"errors"
	"fmt"
)

const (
	typeI32 = 0x7f
	typeI64 = 0x7e

	opUnreachable = 0x00
	opNop         = 0x01
	opBlock       = 0x02
	opLoop        = 0x03
	opIf          = 0x04
	opElse        = 0x05
	opEnd         = 0x0b
	opBr          = 0x0c
	opBrIf        = 0x0d
	opBrTable     = 0x0e
	opReturn      = 0x0f
	opCall        = 0x10
	opLocalGet    = 0x20
	opGlobalGet   = 0x23
	opGlobalSet   = 0x24
	opI64Const    = 0x42
	opI64LtS      = 0x53
	opI64Sub      = 0x7d
	opI64ShrU     = 0x88
	opI64ExtendU  = 0xad
)

// toll is what has to be put in at a place of a function's code.
type toll struct {
	at   int    // before this byte
	cost uint64 // of the code that begins here
	look bool   // whether anything is left
	move bool   // many things are about to be moved, and their number is on the stack
}

// bodies puts the counter into the code of every function.
func (m *module) bodies() error {
	i, ok := m.find(idCode)
	if !ok {
		return nil
	}
	n, r := m.items(idCode)
	out := unsigned(nil, n)
	for f := range n {
		b := r.take(r.u32())
		if r.err != nil {
			return fmt.Errorf("code: %w", r.err)
		}
		b, err := m.body(b)
		if err != nil {
			return fmt.Errorf("code of function %d: %w", f, err)
		}
		out = append(unsigned(out, uint64(len(b))), b...)
	}
	if len(r.rest()) > 0 { // it would be taken for what is put in
		return errors.New("code: there is more than it says")
	}
	m.sections[i].body = out
	return nil
}

func (m *module) body(b []byte) ([]byte, error) {
	r := &reader{b: b}
	for range r.u32() { // its variables
		r.u32()
		r.valueType()
		if r.err != nil {
			return nil, r.err
		}
	}
	tolls, err := m.walk(r)
	if err != nil {
		return nil, err
	}
	out, from := make([]byte, 0, len(b)+16*len(tolls)), 0
	for _, t := range tolls {
		if t.cost == 0 && !t.look && !t.move {
			continue
		}
		out = append(out, b[from:t.at]...)
		out, from = m.pay(out, t), t.at
	}
	return append(out, b[from:]...), nil
}

// walk goes through the code of a function and finds where to pay how much.
func (m *module) walk(r *reader) ([]toll, error) {
	tolls := []toll{{at: r.at, look: true}}
	here := 0 // the toll that what comes is part of
	for r.at < len(r.b) {
		at := r.at
		op := r.byte()
		if many := m.immediates(r, op); many {
			tolls = append(tolls, toll{at: at, move: true})
		}
		if r.err != nil {
			return nil, fmt.Errorf("instruction %#x at %d: %w", op, at, r.err)
		}
		switch op {
		case opBlock, opLoop, opElse, opEnd, opNop:
		default:
			tolls[here].cost++
		}
		switch op {
		case opLoop, opIf, opElse, opEnd, opBr, opBrIf, opBrTable, opReturn, opUnreachable:
			here = len(tolls)
			tolls = append(tolls, toll{at: r.at, look: op == opLoop})
		}
	}
	return tolls, nil
}

// pay is the code of a toll. It leaves the stack as it is.
func (m *module) pay(b []byte, t toll) []byte {
	if t.move {
		return unsigned(append(b, opCall), m.funcs)
	}
	if t.cost > 0 {
		b = unsigned(append(b, opGlobalGet), m.globals)
		b = append(signed(append(b, opI64Const), t.cost), opI64Sub)
		b = unsigned(append(b, opGlobalSet), m.globals)
	}
	if t.look {
		b = m.look(b)
	}
	return b
}

// look ends the module if nothing is left.
func (m *module) look(b []byte) []byte {
	b = unsigned(append(b, opGlobalGet), m.globals)
	return append(b, opI64Const, 0, opI64LtS, opIf, 0x40, opUnreachable, opEnd)
}

// mover is the body of a function that gets the number of things to be moved, pays for
// them and returns it.
func (m *module) mover() []byte {
	b := unsigned([]byte{0, opGlobalGet}, m.globals)
	b = append(b, opLocalGet, 0, opI64ExtendU, opI64Const, 4, opI64ShrU, opI64Sub)
	b = unsigned(append(b, opGlobalSet), m.globals)
	b = append(m.look(b), opLocalGet, 0, opEnd)
	return append(unsigned(nil, uint64(len(b))), b...)
}

// own fails for the number of what is put in, of which the module itself has nothing.
func own(r *reader, have uint64, what string) {
	if at := r.u32(); r.err == nil && at >= have {
		r.fail(fmt.Errorf("there is no %s %d", what, at))
	}
}

// immediates passes what belongs to an instruction, and tells whether it is one that
// moves many things.
func (m *module) immediates(r *reader, op byte) (many bool) {
	switch {
	case op == opBlock || op == opLoop || op == opIf:
		r.blockType()
	case op == opGlobalGet || op == opGlobalSet:
		own(r, m.globals, "global")
	case op == opCall || op == 0xd2: // ref.func
		own(r, m.funcs, "function")
	case op == opBr || op == opBrIf || op >= opLocalGet && op <= 0x26: // the number of a label, variable or table
		r.u32()
	case op == opBrTable:
		for range r.u32() {
			if r.u32(); r.err != nil {
				return false
			}
		}
		r.u32()
	case op == 0x11: // call_indirect
		own(r, m.types, "type")
		r.u32()
	case op == 0x1c: // select with types
		for range r.u32() {
			if r.valueType(); r.err != nil {
				return false
			}
		}
	case op >= 0x28 && op <= 0x3e: // load, store
		r.u32()
		r.u32()
	case op == 0x3f || op == 0x40: // memory.size, memory.grow
		r.byte()
	case op == 0xd0: // ref.null
		r.valueType()
	case op == 0x41:
		r.skip(5)
	case op == opI64Const:
		r.skip(10)
	case op == 0x43:
		r.take(4)
	case op == 0x44:
		r.take(8)
	case op == 0xfc:
		return numbered(r)
	case op == 0xfd:
		vector(r)
	case op <= opElse || op == opEnd || op == opReturn || op == 0x1a || op == 0x1b || op >= 0x45 && op <= 0xc4 || op == 0xd1: // nothing
	default:
		r.fail(errors.New("it is not known"))
	}
	return false
}

// numbered is about the instructions that begin with 0xfc.
func numbered(r *reader) (many bool) {
	switch n := r.u32(); n {
	case 0, 1, 2, 3, 4, 5, 6, 7: // floats to integers
	case 8, 10, 12, 14: // memory.init, memory.copy, table.init, table.copy
		r.u32()
		r.u32()
		return true
	case 11, 15, 17: // memory.fill, table.grow, table.fill
		r.u32()
		return true
	case 9, 13, 16: // data.drop, elem.drop, table.size
		r.u32()
	default:
		r.fail(fmt.Errorf("number %d is not known", n))
	}
	return false
}

// vector is about the instructions that begin with 0xfd. The engine reads the number as one
// byte, and a second one as nop.
func vector(r *reader) {
	switch n := r.shortest(); {
	case n <= 11 || n == 92 || n == 93: // loads, store
		r.u32()
		r.u32()
	case n == 12 || n == 13: // a constant, shuffle
		r.take(16)
	case n >= 21 && n <= 34: // one lane
		r.byte()
	case n >= 84 && n <= 91: // one lane of memory
		r.u32()
		r.u32()
		r.byte()
	case n > 255:
		r.fail(fmt.Errorf("number %d is not known", n))
	}
}

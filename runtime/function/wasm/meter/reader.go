package meter

import (
	"errors"
	"fmt"
)

// reader reads from the front; the first thing that is wrong is its error.
type reader struct {
	b   []byte
	at  int
	err error
}

func (r *reader) fail(err error) {
	if r.err == nil {
		r.err = err
	}
	r.at = len(r.b)
}

func (r *reader) byte() byte {
	if r.at >= len(r.b) {
		r.fail(errShort)
		return 0
	}
	r.at++
	return r.b[r.at-1]
}

func (r *reader) take(n uint64) []byte {
	if n > uint64(len(r.b)-r.at) {
		r.fail(errShort)
		return nil
	}
	r.at += int(n)
	return r.b[r.at-int(n) : r.at]
}

func (r *reader) rest() []byte { return r.b[r.at:] }

// u32 reads LEB128 of at most 32 bits.
func (r *reader) u32() uint64 {
	var v uint64
	for shift := 0; shift < 35; shift += 7 {
		c := r.byte()
		v |= uint64(c&0x7f) << shift
		if c < 0x80 {
			if v >= 1<<32 {
				break
			}
			return v
		}
	}
	r.fail(errors.New("a number has more than 32 bits"))
	return 0
}

// skip passes a signed number of at most that many bytes.
func (r *reader) skip(most int) {
	for range most {
		if r.byte() < 0x80 {
			return
		}
	}
	r.fail(errors.New("a number is too long"))
}

// valueType passes one of those that are a byte.
func (r *reader) valueType() {
	if c := r.byte(); r.err == nil && !isValueType(c) {
		r.fail(fmt.Errorf("type %#x is not known", c))
	}
}

// isValueType: numbers, v128, funcref, externref. Other types have parts of their own.
func isValueType(c byte) bool { return c >= 0x7b && c <= 0x7f || c == 0x70 || c == 0x6f }

// blockType passes none, a type, or the number of one.
func (r *reader) blockType() {
	at := r.at
	r.skip(5)
	if r.err != nil {
		return
	}
	first, last := r.b[at], r.b[r.at-1]
	if last&0x40 != 0 && !(r.at == at+1 && (first == 0x40 || isValueType(first))) { // it is negative
		r.fail(fmt.Errorf("type %x is not known", r.b[at:r.at]))
	}
}

// shortest reads a number that is written in no more bytes than it needs.
func (r *reader) shortest() uint64 {
	at := r.at
	v := r.u32()
	if r.err == nil && r.at > at+1 && r.b[r.at-1] == 0 {
		r.fail(errors.New("a number is longer than it needs to be"))
	}
	return v
}

func (r *reader) limits() {
	more := r.byte()&1 != 0
	r.u32()
	if more {
		r.u32()
	}
}

func unsigned(b []byte, v uint64) []byte {
	for ; v >= 0x80; v >>= 7 {
		b = append(b, byte(v&0x7f)|0x80)
	}
	return append(b, byte(v))
}

// signed is of a v that is not negative.
func signed(b []byte, v uint64) []byte {
	for ; v >= 0x40; v >>= 7 {
		b = append(b, byte(v&0x7f)|0x80)
	}
	return append(b, byte(v))
}

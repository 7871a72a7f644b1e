package fuse

import (
	"encoding/binary"
	"errors"

	"golang.org/x/sys/unix"
)

// The part of the protocol (linux/fuse.h) that a single file needs; the numbers
// are the kernel's.
const (
	opForget      = 2
	opGetattr     = 3
	opOpen        = 14
	opRead        = 15
	opStatfs      = 17
	opRelease     = 18
	opInit        = 26
	opInterrupt   = 36
	opDestroy     = 38
	opBatchForget = 42

	kernelMajor = 7
	kernelMinor = 31 // the newest version of the protocol we need; 5.2

	initAsyncRead = 1 << 0
	initAsyncDIO  = 1 << 15 // a loop device reads many pieces at a time
	initMaxPages  = 1 << 22

	openKeepCache = 1 << 1
	openNoFlush   = 1 << 5
)

const (
	inHeader  = 40
	outHeader = 16
	attrSize  = 88
)

var le = binary.LittleEndian

// request is one message of the kernel; body is behind the header.
type request struct {
	op     uint32
	unique uint64
	body   []byte
}

var errShort = errors.New("message is shorter than its header says")

func parse(b []byte) (request, error) {
	if len(b) < inHeader {
		return request{}, errShort
	}
	n := le.Uint32(b)
	if n < inHeader || int(n) > len(b) {
		return request{}, errShort
	}
	return request{op: le.Uint32(b[4:]), unique: le.Uint64(b[8:]), body: b[inHeader:n]}, nil
}

// readRange is what a read asks for.
func (r *request) readRange() (off int64, size uint32, err error) {
	if len(r.body) < 24 {
		return 0, 0, errShort
	}
	return int64(le.Uint64(r.body[8:])), le.Uint32(r.body[16:]), nil
}

// reply begins an answer with room for n bytes of body.
func (r *request) reply(n int) []byte {
	b := make([]byte, outHeader+n)
	r.head(b, n)
	return b
}

// head writes the header of a good answer with n bytes of body.
func (r *request) head(b []byte, n int) {
	le.PutUint32(b, uint32(outHeader+n))
	le.PutUint32(b[4:], 0)
	le.PutUint64(b[8:], r.unique)
}

func (r *request) fail(e unix.Errno) []byte {
	b := r.reply(0)
	le.PutUint32(b[4:], uint32(-int32(e)))
	return b
}

// attr of the one file there is.
func attr(b []byte, size int64) {
	const never = 1 << 40 // seconds: it does not change
	le.PutUint64(b, never)
	a := b[16:]
	le.PutUint64(a[0:], 1) // inode number
	le.PutUint64(a[8:], uint64(size))
	le.PutUint64(a[16:], uint64(size+511)/512)
	le.PutUint32(a[60:], unix.S_IFREG|0o400)
	le.PutUint32(a[64:], 1) // links
	le.PutUint32(a[80:], 4096)
}

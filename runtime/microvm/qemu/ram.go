package qemu

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"io"
	"os"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/fault"
)

// ramBlock is the piece in which memory is read, hashed and written.
const ramBlock = 64 << 10

var zeroBlock [ramBlock]byte

// copyRAM copies memory of size bytes from a file to one that is all zeros, without the blocks
// that are zeros, and returns its digest: SHA-256 over each block that is not, in
// order, behind its offset as eight bytes, most significant first. Holes of the file
// are not read, and where they are makes no difference.
func copyRAM(ctx context.Context, to, from *os.File, size int64) (digest string, err error) {
	h := sha256.New()
	buf := make([]byte, ramBlock)
	for at := int64(0); at < size; {
		if err := ctx.Err(); err != nil {
			return "", dsec.E(dsec.ClassOf(err), "copy", "memory of a virtual machine", err)
		}
		data, err := unix.Seek(int(from.Fd()), at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			break // nothing but a hole follows
		}
		if err != nil {
			return "", dsec.E(dsec.Internal, "seek", from.Name(), err)
		}
		if at = max(at, data/ramBlock*ramBlock); at >= size {
			break
		}
		b := buf[:min(ramBlock, size-at)]
		if _, err := from.ReadAt(b, at); err != nil {
			return "", dsec.E(readClass(err), "read", from.Name(), cause(err))
		}
		if !bytes.Equal(b, zeroBlock[:len(b)]) {
			var off [8]byte
			binary.BigEndian.PutUint64(off[:], uint64(at))
			h.Write(off[:])
			h.Write(b)
			if _, err := to.WriteAt(b, at); err != nil {
				return "", dsec.E(fault.Class(err, dsec.Internal), "write", to.Name(), cause(err))
			}
		}
		at += int64(len(b))
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// readClass: a file that ends too early is not what it was.
func readClass(err error) dsec.Class {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return dsec.Corrupt
	}
	return fault.Class(err, dsec.Internal)
}

package qcow2

import (
	"encoding/binary"
	"io"

	"github.com/opendsec/dsec"
)

// Create writes an empty image of a disk, version 3, which names no other file: what it stands on is told to
// who opens it. Nothing is read from w.
func Create(w io.WriterAt, size int64) error {
	const (
		bits    = 16
		cluster = 1 << bits
		perL2   = cluster / 8 * cluster // bytes of the disk
	)
	if size <= 0 || size > MaxSize || size%512 != 0 {
		return dsec.Errorf(dsec.Invalid, "make", "qcow2 image", "a disk of %d bytes: whole sectors of 512, up to %d", size, int64(MaxSize))
	}
	entries := (size + perL2 - 1) / perL2
	l1 := (entries*8 + cluster - 1) / cluster // clusters
	// Head, table of counts, one block of counts (of 32,768 clusters), first table.
	const l1At = 3
	used := l1At + l1
	be := binary.BigEndian
	head := make([]byte, 112)
	be.PutUint32(head[0:], magic)
	be.PutUint32(head[4:], 3)
	be.PutUint32(head[20:], bits)
	be.PutUint64(head[24:], uint64(size))
	be.PutUint32(head[36:], uint32(entries))
	be.PutUint64(head[40:], l1At*cluster)
	be.PutUint64(head[48:], 1*cluster) // table of counts
	be.PutUint32(head[56:], 1)         // its clusters
	be.PutUint32(head[96:], 4)         // counts of 16 bits
	be.PutUint32(head[100:], 112)      // bytes of the head; no extension follows
	table := make([]byte, 8)
	be.PutUint64(table, 2*cluster)
	counts := make([]byte, 2*used)
	for i := range used {
		be.PutUint16(counts[2*i:], 1)
	}
	for _, part := range []struct {
		at int64
		b  []byte
	}{{0, head}, {1 * cluster, table}, {2 * cluster, counts}, {(used * cluster) - 1, []byte{0}}} {
		if _, err := w.WriteAt(part.b, part.at); err != nil {
			return err
		}
	}
	return nil
}

package qcow2

import (
	"bytes"
	"compress/flate"
	"encoding/binary"
	"errors"
	"io"

	"github.com/klauspost/compress/zstd"

	"github.com/opendsec/dsec"
)

// Bounds of what is read.
const (
	MaxSize = 16 << 40 // bytes of a disk
	maxL1   = 32 << 20 // bytes of the first table, as QEMU has it
	magic   = 0x514649fb
)

// Features that a reader must know of.
const (
	dirty    = 1 << 0 // counts of references may be wrong, which is nothing to who only reads
	corrupt  = 1 << 1
	external = 1 << 2
	method   = 1 << 3 // of compression
)

// Image is one that was looked at. Its methods may not be called concurrently.
type Image struct {
	f        io.ReaderAt
	fileSize int64
	size     int64
	bits     uint
	zstd     *zstd.Decoder // nil: deflate
	v3       bool

	l1     []uint64
	l2     []byte // of l2At
	l2At   uint64
	packed []byte // the last compressed cluster that was read
	entry  uint64 // its
}

// Is says whether a file begins like one.
func Is(head []byte) bool {
	return len(head) >= 4 && binary.BigEndian.Uint32(head) == magic
}

// Open looks at the head and the first table of a file of so many bytes.
func Open(f io.ReaderAt, fileSize int64) (*Image, error) {
	bad := func(format string, args ...any) (*Image, error) {
		return nil, dsec.Errorf(dsec.Corrupt, "read", "qcow2 image", format, args...)
	}
	no := func(format string, args ...any) (*Image, error) {
		return nil, dsec.Errorf(dsec.Unsupported, "read", "qcow2 image", format, args...)
	}
	head := make([]byte, 112)
	n, err := f.ReadAt(head[:min(int64(len(head)), fileSize)], 0)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, dsec.E(dsec.Internal, "read", "qcow2 image", err)
	}
	if n < 72 || !Is(head) {
		return bad("it does not begin like one")
	}
	be := binary.BigEndian
	i := &Image{f: f, fileSize: fileSize, size: int64(be.Uint64(head[24:])), bits: uint(be.Uint32(head[20:]))}
	version := be.Uint32(head[4:])
	var features uint64
	switch {
	case version == 3 && n >= 104:
		i.v3 = true
		features = be.Uint64(head[72:])
	case version != 2:
		return no("version %d", version)
	}
	switch {
	case be.Uint64(head[8:]) != 0 || be.Uint32(head[16:]) != 0:
		return no("it stands on another file; put both into one with qemu-img convert")
	case features&external != 0:
		return no("its data are in another file; put both into one with qemu-img convert")
	case be.Uint32(head[32:]) != 0:
		return no("it is encrypted")
	case be.Uint32(head[60:]) != 0:
		return no("it has %d snapshots inside; leave them out with qemu-img convert", be.Uint32(head[60:]))
	case features&corrupt != 0:
		return bad("it is marked as corrupt; see qemu-img check")
	case features&^(dirty|method) != 0:
		return no("it has the features %#x, which are not known here", features&^(dirty|method))
	case i.bits < 9 || i.bits > 21:
		return bad("clusters of 2^%d bytes", i.bits)
	case i.size <= 0 || i.size > MaxSize || i.size%512 != 0:
		return bad("a disk of %d bytes: whole sectors of 512, up to %d", i.size, int64(MaxSize))
	}
	if features&method != 0 {
		if n < 105 || be.Uint32(head[100:]) < 105 || head[104] != 1 {
			return no("it is compressed in a way that is not known here")
		}
		if i.zstd, err = zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(8<<20)); err != nil {
			return nil, dsec.E(dsec.Internal, "read", "qcow2 image", err)
		}
	}
	if err := i.readL1(be.Uint32(head[36:]), be.Uint64(head[40:])); err != nil {
		return nil, err
	}
	return i, nil
}

// Size is that of the disk in bytes.
func (i *Image) Size() int64 { return i.size }

func (i *Image) corrupt(format string, args ...any) error {
	return dsec.Errorf(dsec.Corrupt, "read", "qcow2 image", format, args...)
}

func (i *Image) readL1(entries uint32, at uint64) error {
	cluster := int64(1) << i.bits
	perL2 := cluster / 8 * cluster // bytes of the disk
	need := (i.size + perL2 - 1) / perL2
	if int64(entries) < need || int64(entries)*8 > maxL1 {
		return i.corrupt("a first table of %d entries for a disk of %d bytes", entries, i.size)
	}
	b := make([]byte, need*8)
	if err := i.read(b, at, "the first table"); err != nil {
		return err
	}
	i.l1 = make([]uint64, need)
	for k := range i.l1 {
		i.l1[k] = binary.BigEndian.Uint64(b[8*k:])
	}
	return nil
}

// read reads what has to be in the file, from a border of clusters.
func (i *Image) read(b []byte, at uint64, what string) error {
	if at == 0 || at&(1<<i.bits-1) != 0 || at > uint64(i.fileSize) || int64(len(b)) > i.fileSize-int64(at) {
		return i.corrupt("%s is at byte %d, of %d", what, at, i.fileSize)
	}
	if n, err := i.f.ReadAt(b, int64(at)); n < len(b) {
		return dsec.E(dsec.Internal, "read", "qcow2 image", err)
	}
	return nil
}

// Bits of entries.
const (
	offsetBits   = 0x00fffffffffffe00
	isCompressed = 1 << 62
	isZero       = 1 << 0
)

// ReadAt reads from the disk.
func (i *Image) ReadAt(p []byte, off int64) (n int, err error) {
	for n < len(p) {
		if off+int64(n) >= i.size {
			return n, io.EOF
		}
		in := (off + int64(n)) & (1<<i.bits - 1)
		part := p[n:min(int64(len(p)), int64(n)+1<<i.bits-in, i.size-off)]
		if err := i.part(part, off+int64(n), in); err != nil {
			return n, err
		}
		n += len(part)
	}
	return n, nil
}

// part reads what is in one cluster, from its byte in.
func (i *Image) part(p []byte, off, in int64) error {
	entry, err := i.entryOf(off)
	if err != nil {
		return err
	}
	if entry&isCompressed != 0 {
		if err := i.unpack(entry); err != nil {
			return err
		}
		copy(p, i.packed[in:])
		return nil
	}
	at := entry & offsetBits
	if at == 0 || i.v3 && entry&isZero != 0 {
		clear(p)
		return nil
	}
	if at&(1<<i.bits-1) != 0 || at >= uint64(i.fileSize) {
		return i.corrupt("a cluster is at byte %d, of %d", at, i.fileSize)
	}
	// The last cluster of a file may be shorter.
	n, err := i.f.ReadAt(p, int64(at)+in)
	if err != nil && !errors.Is(err, io.EOF) {
		return dsec.E(dsec.Internal, "read", "qcow2 image", err)
	}
	clear(p[n:])
	return nil
}

// Reader reads the disk once, from its beginning to its end, and refuses an image with more in it than a
// file of its size can hold: each cluster of a file is there for one of the disk.
func (i *Image) Reader() io.Reader { return &reader{i: i} }

type reader struct {
	i     *Image
	off   int64
	plain int64 // clusters that were read
}

func (r *reader) Read(p []byte) (int, error) {
	i := r.i
	if r.off >= i.size {
		return 0, io.EOF
	}
	cluster := int64(1) << i.bits
	if r.off&(cluster-1) == 0 {
		entry, err := i.entryOf(r.off)
		if err != nil {
			return 0, err
		}
		if entry&isCompressed == 0 && entry&offsetBits != 0 {
			r.plain++
		}
		if r.plain > i.fileSize>>i.bits+1 {
			return 0, i.corrupt("it says it has more clusters than its %d bytes can hold", i.fileSize)
		}
	}
	// No more than one cluster, so that each is counted.
	p = p[:min(int64(len(p)), cluster-r.off&(cluster-1))]
	n, err := i.ReadAt(p, r.off)
	r.off += int64(n)
	return n, err
}

func (i *Image) entryOf(off int64) (uint64, error) {
	perL2 := int64(1) << (i.bits - 3)
	at := i.l1[off>>i.bits/perL2] & offsetBits
	if at == 0 {
		return 0, nil
	}
	if at != i.l2At {
		b := make([]byte, 1<<i.bits)
		if err := i.read(b, at, "a second table"); err != nil {
			return 0, err
		}
		i.l2, i.l2At = b, at
	}
	return binary.BigEndian.Uint64(i.l2[off>>i.bits%perL2*8:]), nil
}

// unpack reads a compressed cluster.
func (i *Image) unpack(entry uint64) error {
	if i.packed != nil && i.entry == entry {
		return nil
	}
	x := 62 - (i.bits - 8)
	at := entry & (1<<x - 1)
	sectors := entry&(1<<62-1)>>x + 1
	length := int64(sectors*512 - at&511)
	if at == 0 || at >= uint64(i.fileSize) {
		return i.corrupt("a compressed cluster is at byte %d, of %d", at, i.fileSize)
	}
	b := make([]byte, min(length, i.fileSize-int64(at)))
	if n, err := i.f.ReadAt(b, int64(at)); n < len(b) {
		return dsec.E(dsec.Internal, "read", "qcow2 image", err)
	}
	var r io.Reader = flate.NewReader(bytes.NewReader(b))
	if i.zstd != nil {
		if err := i.zstd.Reset(bytes.NewReader(b)); err != nil {
			return i.corrupt("a compressed cluster: %w", err)
		}
		r = i.zstd
	}
	out := make([]byte, 1<<i.bits)
	if _, err := io.ReadFull(r, out); err != nil {
		i.packed = nil
		return i.corrupt("a compressed cluster at byte %d: %w", at, err)
	}
	i.packed, i.entry = out, entry
	return nil
}

package erofs

import (
	"bufio"
	"errors"
	"io"
)

// Stats says what a metadata file holds.
type Stats struct {
	Inodes   int64
	MetaSize int64 // bytes
}

// Write writes the metadata file of the tree. dataBlocks is the length of the
// data file that the runs of the tree point into.
func Write(w io.Writer, root *Inode, dataBlocks uint64) (Stats, error) {
	if !root.IsDir() {
		return Stats{}, errors.New("root: not a directory")
	}
	if dataBlocks > maxBlocks {
		return Stats{}, errors.New("data: more than 16 TiB")
	}
	l, err := plan(root, false)
	if err != nil {
		return Stats{}, err
	}
	if l.inodes[0].nid() > 1<<16-1 {
		return Stats{}, errors.New("root: attributes too large")
	}
	e := &encoder{w: bufio.NewWriterSize(w, 1<<17), layout: l}
	e.super(uint32(dataBlocks))
	for i, n := range l.inodes {
		e.inode(n, uint32(i+1))
	}
	e.padTo(roundUp(l.end, BlockSize))
	for _, n := range l.inodes {
		e.ownBlocks(n)
	}
	if err := e.w.Flush(); err != nil {
		return Stats{}, err
	}
	return Stats{Inodes: int64(len(l.inodes)), MetaSize: e.pos}, nil
}

// encoder writes the planned file from front to back. Errors stay in the
// buffered writer until Flush.
type encoder struct {
	*layout
	w   *bufio.Writer
	pos int64
}

func (e *encoder) write(b []byte) {
	n, _ := e.w.Write(b)
	e.pos += int64(n)
	if n < len(b) {
		e.pos += int64(len(b) - n) // the error is reported by Flush
	}
}

func (e *encoder) padTo(pos int64) {
	for e.pos < pos {
		e.write(zeros[:min(pos-e.pos, BlockSize)])
	}
}

func (e *encoder) super(dataBlocks uint32) {
	var b [BlockSize]byte
	s := b[superOffset:]
	le.PutUint32(s[0:], superMagic)
	le.PutUint32(s[8:], compatChecksum|compatMtime)
	s[12] = BlockBits
	le.PutUint16(s[14:], uint16(e.inodes[0].nid()))
	le.PutUint64(s[16:], uint64(len(e.inodes)))
	le.PutUint32(s[36:], uint32(e.blocks))
	incompat := uint32(incompatChunked)
	if e.flat {
		incompat = 0
	}
	if dataBlocks > 0 {
		incompat |= incompatDevices
		le.PutUint16(s[86:], 1)
		slot := superOffset + superSize
		le.PutUint16(s[88:], uint16(slot/slotSize))
		le.PutUint32(b[slot+64:], dataBlocks)
		le.PutUint32(b[slot+68:], e.flatBase)
	}
	le.PutUint32(s[80:], incompat)
	le.PutUint32(s[4:], checksum(s))
	e.write(b[:])
}

func (e *encoder) inode(n *Inode, ino uint32) {
	e.padTo(n.pos)
	var b [inodeSize]byte
	le.PutUint16(b[0:], 1|uint16(n.layout)<<1)
	xattrs := xattrSize(n.Xattrs)
	if xattrs > 0 {
		le.PutUint16(b[2:], uint16((xattrs-xattrHeader)/4+1))
	}
	le.PutUint16(b[4:], uint16(n.Mode))
	size := n.bodySize()
	if n.Mode&TypeMask == TypeRegular {
		size = n.Size
	}
	le.PutUint64(b[8:], uint64(size))
	le.PutUint32(b[16:], e.union(n))
	le.PutUint32(b[20:], ino)
	le.PutUint32(b[24:], n.UID)
	le.PutUint32(b[28:], n.GID)
	le.PutUint64(b[32:], uint64(n.Mtime))
	le.PutUint32(b[40:], n.Nsec)
	le.PutUint32(b[44:], n.nlink)
	e.write(b[:])
	e.xattrs(n.Xattrs)
	switch n.layout {
	case layoutChunked:
		e.padTo(roundUp(e.pos, 8))
		e.indexes(n)
	case layoutInline:
		body := e.body(n)
		e.write(body[len(body)/BlockSize*BlockSize:])
	}
}

// union is the field that means another thing in each type of inode.
func (e *encoder) union(n *Inode) uint32 {
	switch {
	case n.layout == layoutChunked:
		shift, _ := chunks(n.Size, n.Runs)
		return chunkFormatIndexes | uint32(shift-BlockBits)
	case n.Mode&TypeMask == TypeChar || n.Mode&TypeMask == TypeBlock:
		return n.Rdev
	}
	return n.block
}

func (e *encoder) xattrs(xs []Xattr) {
	if len(xs) == 0 {
		return
	}
	e.write(make([]byte, xattrHeader))
	for _, x := range xs {
		index, suffix, _ := splitXattr(x.Name)
		h := []byte{byte(len(suffix)), index, 0, 0}
		le.PutUint16(h[2:], uint16(len(x.Value)))
		e.write(h)
		e.write([]byte(suffix))
		e.write(x.Value)
		e.padTo(roundUp(e.pos, 4))
	}
}

func (e *encoder) indexes(n *Inode) {
	shift, count := chunks(n.Size, n.Runs)
	runs := n.Runs
	for c := range count {
		off := c << shift
		for len(runs) > 0 && runs[0].Off+int64(runs[0].Count)*BlockSize <= off {
			runs = runs[1:]
		}
		var b [8]byte
		if len(runs) > 0 && runs[0].Off <= off {
			le.PutUint16(b[2:], dataDevice)
			le.PutUint32(b[4:], runs[0].Block+uint32((off-runs[0].Off)/BlockSize))
		} else {
			le.PutUint32(b[4:], nullBlock)
		}
		e.write(b[:])
	}
}

func (e *encoder) body(n *Inode) []byte {
	if n.IsDir() {
		return n.dirBytes(e.parents[n])
	}
	return []byte(n.Target)
}

func (e *encoder) ownBlocks(n *Inode) {
	own := n.ownBlocks()
	if own == 0 {
		return
	}
	body := e.body(n)
	e.write(body[:min(int64(len(body)), own*BlockSize)])
	e.padTo(roundUp(e.pos, BlockSize))
}

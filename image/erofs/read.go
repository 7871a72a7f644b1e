package erofs

import (
	"errors"
	"fmt"
	"io"
)

// Image reads what Write wrote. It reads no other kind of EROFS: compression,
// inline file contents, compact inodes and shared attributes are refused.
type Image struct {
	meta       io.ReaderAt
	data       io.ReaderAt
	metaSize   int64
	dataBlocks uint64
	root       uint64
	inodes     uint64
}

// Node is one inode of an Image.
type Node struct {
	NID    uint64
	Mode   uint32
	UID    uint32
	GID    uint32
	Rdev   uint32
	Nlink  uint32
	Nsec   uint32
	Mtime  int64
	Size   int64
	im     *Image
	layout byte
	union  uint32
	xattrs int64 // bytes behind the inode
}

// Dirent is a name in a directory.
type Dirent struct {
	Name string
	NID  uint64
	Type byte
}

var errShort = errors.New("points behind the end of the file")

// Open reads the superblock. data may be nil if no contents will be read.
func Open(meta io.ReaderAt, metaSize int64, data io.ReaderAt) (*Image, error) {
	im := &Image{meta: meta, data: data, metaSize: metaSize}
	b, err := im.at(0, BlockSize)
	if err != nil {
		return nil, fmt.Errorf("superblock: %w", err)
	}
	s := b[superOffset:]
	sum := le.Uint32(s[4:])
	le.PutUint32(s[4:], 0)
	incompat := le.Uint32(s[80:])
	switch {
	case le.Uint32(s) != superMagic:
		return nil, errors.New("superblock: not EROFS")
	case s[12] != BlockBits || s[13] != 0 || s[90] != 0:
		return nil, errors.New("superblock: block size or extensions not ours")
	case incompat&^incompatKnown != 0:
		return nil, fmt.Errorf("superblock: features %#x not ours", incompat)
	case le.Uint32(s[8:])&compatChecksum != 0 && sum != checksum(s):
		return nil, errors.New("superblock: wrong checksum")
	case le.Uint32(s[40:]) != 0:
		return nil, errors.New("superblock: metadata does not start at block 0")
	}
	im.root, im.inodes = uint64(le.Uint16(s[14:])), le.Uint64(s[16:])
	if n := le.Uint16(s[86:]); n > 1 {
		return nil, fmt.Errorf("superblock: %d devices", n)
	} else if n == 1 {
		slot, err := im.at(int64(le.Uint16(s[88:]))*slotSize, slotSize)
		if err != nil {
			return nil, fmt.Errorf("device table: %w", err)
		}
		im.dataBlocks = uint64(le.Uint32(slot[64:]))
	}
	return im, nil
}

// DataBlocks is the length of the data file that the image asks for.
func (im *Image) DataBlocks() uint64 { return im.dataBlocks }

// Inodes is the number of inodes the superblock tells.
func (im *Image) Inodes() uint64 { return im.inodes }

// at reads n bytes of metadata.
func (im *Image) at(off, n int64) ([]byte, error) {
	if off < 0 || n < 0 || off > im.metaSize || n > im.metaSize-off {
		return nil, errShort
	}
	b := make([]byte, n)
	if _, err := im.meta.ReadAt(b, off); err != nil && !(err == io.EOF && n == 0) {
		return nil, err
	}
	return b, nil
}

// Root returns the root directory.
func (im *Image) Root() (*Node, error) {
	n, err := im.Node(im.root)
	if err != nil {
		return nil, err
	}
	if n.Mode&TypeMask != TypeDir {
		return nil, errors.New("root: not a directory")
	}
	return n, nil
}

// Node reads an inode.
func (im *Image) Node(nid uint64) (*Node, error) {
	if nid > uint64(im.metaSize)/inodeAlign {
		return nil, fmt.Errorf("inode %d: %w", nid, errShort)
	}
	b, err := im.at(int64(nid)*inodeAlign, inodeSize)
	if err != nil {
		return nil, fmt.Errorf("inode %d: %w", nid, err)
	}
	format := le.Uint16(b)
	n := &Node{NID: nid, im: im, layout: byte(format >> 1), union: le.Uint32(b[16:]),
		Mode: uint32(le.Uint16(b[4:])), Size: int64(le.Uint64(b[8:])), UID: le.Uint32(b[24:]), GID: le.Uint32(b[28:]),
		Mtime: int64(le.Uint64(b[32:])), Nsec: le.Uint32(b[40:]), Nlink: le.Uint32(b[44:])}
	if c := le.Uint16(b[2:]); c > 0 {
		n.xattrs = xattrHeader + 4*(int64(c)-1)
	}
	if err := n.check(format); err != nil {
		return nil, fmt.Errorf("inode %d: %w", nid, err)
	}
	return n, nil
}

func (n *Node) check(format uint16) error {
	kind := n.Mode & TypeMask
	switch {
	case format&1 == 0 || format>>4 != 0:
		return fmt.Errorf("format %#x not ours", format)
	case fileType(n.Mode) == 0:
		return fmt.Errorf("mode %o: unknown type", n.Mode)
	case n.Size < 0 || n.Size > 1<<60 || n.Nsec >= 1e9:
		return errors.New("size or time out of range")
	case kind == TypeRegular && n.layout != layoutChunked && (n.layout != layoutPlain || n.Size != 0):
		return errors.New("contents of a file outside the data device")
	case kind != TypeRegular && n.layout != layoutPlain && n.layout != layoutInline:
		return fmt.Errorf("layout %d of a mode %o", n.layout, n.Mode)
	case kind == TypeSymlink && n.Size > MaxTarget, kind == TypeDir && n.Size > n.im.metaSize:
		return fmt.Errorf("size %d: %w", n.Size, errShort)
	}
	if kind == TypeChar || kind == TypeBlock {
		n.Rdev = n.union
	}
	return nil
}

// IsWhiteout is as of Inode.
func (n *Node) IsWhiteout() bool { return n.Mode&TypeMask == TypeChar && n.Rdev == 0 }

func (n *Node) pos() int64 { return int64(n.NID) * inodeAlign }

// body reads what a directory or symbolic link keeps in the metadata file.
func (n *Node) body() ([]byte, error) {
	whole := n.Size
	if n.layout == layoutInline {
		whole = n.Size / BlockSize * BlockSize
	}
	out, err := n.im.at(int64(n.union)*BlockSize, whole)
	if whole == 0 {
		out, err = nil, nil
	}
	if err != nil {
		return nil, err
	}
	if whole < n.Size {
		tail, err := n.im.at(n.pos()+inodeSize+n.xattrs, n.Size-whole)
		if err != nil {
			return nil, err
		}
		out = append(out, tail...)
	}
	return out, nil
}

// Target returns what a symbolic link points to.
func (n *Node) Target() (string, error) {
	if n.Mode&TypeMask != TypeSymlink {
		return "", errors.New("not a symbolic link")
	}
	b, err := n.body()
	return string(b), err
}

// Xattrs reads the extended attributes.
func (n *Node) Xattrs() ([]Xattr, error) {
	if n.xattrs == 0 {
		return nil, nil
	}
	b, err := n.im.at(n.pos()+inodeSize, n.xattrs)
	if err != nil {
		return nil, fmt.Errorf("attributes of inode %d: %w", n.NID, err)
	}
	if b[4] != 0 {
		return nil, fmt.Errorf("attributes of inode %d: shared", n.NID)
	}
	var out []Xattr
	for b = b[xattrHeader:]; len(b) >= 4; {
		nameLen, valueLen := int(b[0]), int(le.Uint16(b[2:]))
		size := roundUp(4+nameLen+valueLen, 4)
		if size > len(b) {
			return nil, fmt.Errorf("attributes of inode %d: %w", n.NID, errShort)
		}
		name, err := xattrName(b[1], string(b[4:4+nameLen]))
		if err != nil {
			return nil, fmt.Errorf("attributes of inode %d: %w", n.NID, err)
		}
		out = append(out, Xattr{Name: name, Value: append([]byte{}, b[4+nameLen:4+nameLen+valueLen]...)})
		b = b[size:]
	}
	return out, nil
}

func xattrName(index byte, suffix string) (string, error) {
	for _, p := range xattrPrefixes {
		if p.index == index && p.whole == (suffix == "") {
			return p.prefix + suffix, nil
		}
	}
	return "", fmt.Errorf("attribute of prefix %d", index)
}

// Package erofs writes and reads EROFS images that keep metadata and file
// contents in two files: the metadata file is a complete EROFS file system
// whose regular files are chunk-based and point into one extra device, the data
// file, which holds nothing but contents, each aligned to a block.
//
// Nothing about contents is in the metadata file (no inline tails), so it is
// small and can be whole on a machine while the data is not. Directories and
// symbolic links live in the metadata file.
//
// The writer is deterministic: the same tree and the same order of contents
// give the same bytes. It takes memory by inode, never by byte of content. The
// reader checks every offset it follows; it is safe on hostile images.
//
// Layout and limits: docs/formats/layer.md.
package erofs

import (
	"encoding/binary"
	"hash/crc32"
)

// Sizes that are part of the format we write.
const (
	BlockBits = 12
	BlockSize = 1 << BlockBits
	// Align is what the data device starts at when metadata and data are laid
	// out as one device, and what both files are padded to when mapped: one
	// huge page.
	Align = 2 << 20

	MaxName    = 255      // bytes of one path component
	MaxPath    = 16 << 10 // bytes of a whole path
	MaxTarget  = 4095     // bytes of a symbolic link
	MaxXattr   = 65535    // bytes of one extended attribute's value
	maxBlocks  = 1<<32 - 2
	holeBits   = 16 // holes are found in units of at least 64 KiB
	chunkBits  = 26 // chunks are at most 64 MiB
	maxIndexes = 1 << 16
)

// The numbers of the on-disk format.
const (
	superOffset = 1024
	superSize   = 128
	superMagic  = 0xE0F5E1E2
	slotSize    = 128 // device slot
	inodeAlign  = 32  // a nid counts units of this
	inodeSize   = 64  // extended inode
	xattrHeader = 12
	direntSize  = 12

	compatChecksum     = 1 << 0
	compatMtime        = 1 << 1
	incompatChunked    = 1 << 2
	incompatDevices    = 1 << 3
	incompatKnown      = incompatChunked | incompatDevices | 1 // 1: zero padding, which concerns compression only
	layoutPlain        = 0
	layoutInline       = 2
	layoutChunked      = 4
	chunkFormatIndexes = 0x20
	chunkFormatBits    = 0x1f
	nullBlock          = 0xffffffff
	dataDevice         = 1
)

// Types of inodes as in st_mode, and of directory entries.
const (
	TypeMask    = 0o170000
	TypeSocket  = 0o140000
	TypeSymlink = 0o120000
	TypeRegular = 0o100000
	TypeBlock   = 0o060000
	TypeDir     = 0o040000
	TypeChar    = 0o020000
	TypeFifo    = 0o010000
)

var le = binary.LittleEndian

func fileType(mode uint32) byte {
	switch mode & TypeMask {
	case TypeRegular:
		return 1
	case TypeDir:
		return 2
	case TypeChar:
		return 3
	case TypeBlock:
		return 4
	case TypeFifo:
		return 5
	case TypeSocket:
		return 6
	case TypeSymlink:
		return 7
	}
	return 0
}

// xattrPrefixes in the order in which they are tried; the two ACLs have no
// name of their own.
var xattrPrefixes = []struct {
	prefix string
	index  byte
	whole  bool
}{
	{"system.posix_acl_access", 2, true},
	{"system.posix_acl_default", 3, true},
	{"user.", 1, false},
	{"trusted.", 4, false},
	{"security.", 6, false},
}

// Rdev packs a device number as the format and the kernel's new_encode_dev do.
func Rdev(major, minor uint32) uint32 {
	return minor&0xff | major<<8 | minor&^0xff<<12
}

// RdevParts is the reverse of Rdev.
func RdevParts(r uint32) (major, minor uint32) {
	return r & 0xfff00 >> 8, r&0xff | r>>12&0xfff00
}

// checksum is the kernel's crc32c, which does not invert at the end.
func checksum(b []byte) uint32 {
	return ^crc32.Checksum(b, crc32.MakeTable(crc32.Castagnoli))
}

func roundUp[T int | int64 | uint64](n, to T) T { return (n + to - 1) / to * to }

package linux

import (
	"os"

	"golang.org/x/sys/unix"
)

// WriteInPlace has a file system that would write each block to a new place write it where it is, as is best for what is
// written in pieces, again and again: those of an empty file, or of all files that will be made in a directory or below it.
// File systems that know no such thing do so anyway.
func WriteInPlace(f *os.File) {
	const noCOW = 0x00800000
	if flags, err := unix.IoctlGetUint32(int(f.Fd()), unix.FS_IOC_GETFLAGS); err == nil {
		_ = unix.IoctlSetPointerInt(int(f.Fd()), unix.FS_IOC_SETFLAGS, int(flags|noCOW))
	}
}

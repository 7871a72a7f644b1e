package linux

import (
	"os"

	"golang.org/x/sys/unix"
)

// DropCache drops what the page cache has of a file, except what the kernel does
// not let go of: pages that are mapped. What is not on the disk yet would stay, so
// it is written first.
func DropCache(f *os.File) error {
	if err := unix.Fdatasync(int(f.Fd())); err != nil {
		return os.NewSyscallError("fdatasync", err)
	}
	return os.NewSyscallError("fadvise", unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED))
}

package bench

import (
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// mincore says of each page of a mapping whether it is in memory.
func mincore(m, pages []byte) error {
	_, _, errno := unix.Syscall(unix.SYS_MINCORE, uintptr(unsafe.Pointer(&m[0])), uintptr(len(m)), uintptr(unsafe.Pointer(&pages[0])))
	if errno != 0 {
		return os.NewSyscallError("mincore", errno)
	}
	return nil
}

package resident

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// mincore says of each page of a mapping, in the lowest bit, whether it is in
// the page cache. It faults nothing in.
func mincore(m, vec []byte) error {
	_, _, e := unix.Syscall(unix.SYS_MINCORE, uintptr(unsafe.Pointer(&m[0])), uintptr(len(m)), uintptr(unsafe.Pointer(&vec[0])))
	if e != 0 {
		return e
	}
	return nil
}

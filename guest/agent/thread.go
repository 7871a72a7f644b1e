package agent

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// setGroups sets the groups of the calling thread only; the standard library's
// sets those of all threads.
func setGroups(first *uint32, n int) error {
	_, _, errno := unix.RawSyscall(unix.SYS_SETGROUPS, uintptr(n), uintptr(unsafe.Pointer(first)), 0)
	if errno != 0 {
		return errno
	}
	return nil
}

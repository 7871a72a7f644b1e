package agent

import (
	"os"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// dropAll takes every capability from all threads of the process.
func dropAll() error {
	for c := range uintptr(64) {
		_, _, errno := syscall.AllThreadsSyscall6(unix.SYS_PRCTL, unix.PR_CAPBSET_DROP, c, 0, 0, 0, 0)
		if errno == unix.EINVAL { // beyond the last that the kernel knows
			break
		}
		if errno != 0 {
			return os.NewSyscallError("drop capability", errno)
		}
	}
	head := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var none [2]unix.CapUserData
	_, _, errno := syscall.AllThreadsSyscall(unix.SYS_CAPSET, uintptr(unsafe.Pointer(&head)), uintptr(unsafe.Pointer(&none[0])), 0)
	if errno != 0 {
		return os.NewSyscallError("capset", errno)
	}
	return nil
}

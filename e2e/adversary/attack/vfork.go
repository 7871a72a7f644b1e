package main

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

func atBytes(b *[128]byte) uintptr { return uintptr(unsafe.Pointer(b)) }

// vfork has this thread wait in the kernel until a child that shares its memory
// ends, which it does when somebody writes to a FIFO: never.
func vfork() {
	cmd := text("fifo")
	pid, _, _ := unix.RawSyscall6(unix.SYS_CLONE, unix.CLONE_VFORK|uintptr(unix.SIGCHLD), 0, 0, 0, 0, 0)
	if pid == 0 {
		dir := unix.AT_FDCWD
		_, _, _ = unix.RawSyscall6(unix.SYS_OPENAT, uintptr(dir), cmd, unix.O_WRONLY, 0, 0, 0)
		for {
			_, _, _ = unix.RawSyscall(unix.SYS_EXIT_GROUP, 0, 0, 0)
		}
	}
}

package main

import "golang.org/x/sys/unix"

// oldEntry calls the kernel as 32-bit programs do.
func oldEntry(number uint32) int32

const x32 = 0x40000000

// callsOfTheMachine are those that only this kind has.
func callsOfTheMachine() []call {
	return []call{
		{"ioperm", unix.SYS_IOPERM, [6]uintptr{0x80, 1, 1}},
		{"iopl", unix.SYS_IOPL, [6]uintptr{3}},
		{"modify-ldt", unix.SYS_MODIFY_LDT, [6]uintptr{0, at(), 8}},
		{"x32-entry", unix.SYS_GETPID | x32, [6]uintptr{}},
	}
}

//go:build !amd64

package main

// oldEntry is only of x86.
func oldEntry(uint32) int32 { return 0 }

// ofX86 is a call that other machines have never had.
const ofX86 = 1022

func callsOfTheMachine() []call {
	return []call{{"ioperm", ofX86, [6]uintptr{}}, {"iopl", ofX86, [6]uintptr{}}, {"modify-ldt", ofX86, [6]uintptr{}}, {"x32-entry", ofX86, [6]uintptr{}}}
}

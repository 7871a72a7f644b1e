//go:build !amd64

package main

// oldEntry is only of x86.
func oldEntry(uint32) int32 { return 0 }

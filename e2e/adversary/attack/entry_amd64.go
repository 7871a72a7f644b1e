package main

// oldEntry calls the kernel as 32-bit programs do.
func oldEntry(number uint32) int32

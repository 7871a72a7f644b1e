package linux

import (
	"errors"

	"golang.org/x/sys/unix"
)

// Growing calls a function that reports ERANGE for a buffer that is too small
// with larger ones, up to 1 MiB, and returns what it filled.
func Growing(call func([]byte) (int, error)) ([]byte, error) {
	for size := 256; ; size *= 4 {
		b := make([]byte, size)
		n, err := call(b)
		if errors.Is(err, unix.ERANGE) && size < 1<<20 {
			continue
		}
		if err != nil {
			return nil, err
		}
		return b[:n], nil
	}
}

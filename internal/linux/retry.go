package linux

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"
)

// retry calls f until it is not interrupted: Go's own signals (SIGURG) reach
// system calls that the runtime does not know to be slow.
func retry(f func() error) error {
	for {
		err := f()
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// file makes an *os.File of a descriptor a call returned, or wraps its error.
func file(fd int, err error, op, name string) (*os.File, error) {
	if err != nil {
		return nil, &os.PathError{Op: op, Path: name, Err: err}
	}
	return os.NewFile(uintptr(fd), name), nil
}

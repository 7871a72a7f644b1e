package linux

import (
	"os"

	"golang.org/x/sys/unix"
)

// Duplicate returns another descriptor of what f is. It does not use f.Fd, which
// could make reads block for all who share it.
func Duplicate(f *os.File) (*os.File, error) {
	raw, err := f.SyscallConn()
	if err != nil {
		return nil, err
	}
	fd := -1
	if e := raw.Control(func(n uintptr) { fd, err = unix.FcntlInt(n, unix.F_DUPFD_CLOEXEC, 0) }); e != nil {
		return nil, e
	}
	if err != nil {
		return nil, &os.PathError{Op: "duplicate", Path: f.Name(), Err: err}
	}
	return os.NewFile(uintptr(fd), f.Name()), nil
}

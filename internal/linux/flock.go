package linux

import (
	"os"

	"golang.org/x/sys/unix"
)

// Flock is flock(2) on an open file; how is of unix.LOCK_*. It waits through
// interruptions, which the runtime's own signals cause.
func Flock(f *os.File, how int) error {
	return retry(func() error { return unix.Flock(int(f.Fd()), how) })
}

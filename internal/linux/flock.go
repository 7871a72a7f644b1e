package linux

import (
	"context"
	"os"

	"golang.org/x/sys/unix"
)

// Flock is flock(2) on an open file; how is of unix.LOCK_*. It waits through
// interruptions, which the runtime's own signals cause.
func Flock(f *os.File, how int) error {
	return retry(func() error { return unix.Flock(int(f.Fd()), how) })
}

// FlockContext waits for the exclusive lock of an open file until the context ends, whose
// error it returns then. It closes the file with any error: flock(2) has no end of its own,
// so a lock that nobody waits for any more is given back when it comes.
func FlockContext(ctx context.Context, f *os.File) error {
	got := make(chan error, 1)
	go func() { got <- Flock(f, unix.LOCK_EX) }()
	select {
	case err := <-got:
		if err != nil {
			_ = f.Close() // of no use
		}
		return err
	case <-ctx.Done():
		go func() { <-got; _ = f.Close() }()
		return ctx.Err()
	}
}

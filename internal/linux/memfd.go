package linux

import (
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// SealedFile keeps b in memory behind a descriptor: whoever is handed it can
// read it or run it, and nobody can change it. Its offset is 0.
func SealedFile(name string, b []byte) (*os.File, error) {
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("memfd_create: %w", err)
	}
	f := os.NewFile(uintptr(fd), name)
	if _, err := f.WriteAt(b, 0); err != nil {
		_ = f.Close()
		return nil, err
	}
	if err := seal(f, sealLimit); err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("seal memfd: %w", err)
	}
	return f, nil
}

// sealLimit is how long something else may have a page of a memfd in its hands.
const sealLimit = 10 * time.Second

// seal waits for pages that the kernel has in its hands for a moment, as it does when the
// machine is busy: it gives up on those after a fraction of a second with EBUSY.
func seal(f *os.File, limit time.Duration) error {
	const seals = unix.F_SEAL_SEAL | unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_WRITE
	for end := time.Now().Add(limit); ; {
		_, err := unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, seals)
		if !errors.Is(err, unix.EBUSY) || time.Now().After(end) {
			return err
		}
	}
}

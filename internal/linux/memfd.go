package linux

import (
	"fmt"
	"os"

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
	const seals = unix.F_SEAL_SEAL | unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_WRITE
	if _, err := unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, seals); err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("seal memfd: %w", err)
	}
	return f, nil
}

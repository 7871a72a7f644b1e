package qemu

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/fault"
	"github.com/opendsec/dsec/internal/linux"
	"github.com/opendsec/dsec/internal/within"
	"github.com/opendsec/dsec/runtime/microvm/vmm"
)

// openChecked opens a file whose content is what its digest says.
func openChecked(ctx context.Context, file vmm.File) (*os.File, error) {
	f, err := openRegular(file.Path, os.O_RDONLY)
	if err != nil {
		return nil, err
	}
	h := sha256.New()
	if _, err := io.Copy(h, within.Reader(ctx, f)); err != nil {
		_ = f.Close()
		return nil, dsec.E(fault.Class(err, dsec.Internal), "read", file.Path, err)
	}
	if got := hex.EncodeToString(h.Sum(nil)); got != file.SHA256 {
		_ = f.Close()
		return nil, dsec.Errorf(dsec.Corrupt, "check", file.Path, "its digest is %s, not %s", got, dsec.Quote(file.SHA256))
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		_ = f.Close()
		return nil, dsec.E(dsec.Internal, "read", file.Path, err)
	}
	return f, nil
}

// openSized opens a file of exactly this size.
func openSized(name string, flags int, size int64) (*os.File, error) {
	f, err := openRegular(name, flags)
	if err != nil {
		return nil, err
	}
	st, err := f.Stat()
	if err == nil && st.Size() != size {
		err = dsec.Errorf(dsec.Invalid, "open", name, "it has %d bytes, and its slot %d", st.Size(), size)
	}
	if err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

// openAtMost opens a file that is no larger.
func openAtMost(name string, flags int, size int64) (*os.File, error) {
	f, err := openRegular(name, flags)
	if err != nil {
		return nil, err
	}
	st, err := f.Stat()
	if err == nil && st.Size() > size {
		err = dsec.Errorf(dsec.Invalid, "open", name, "it has %d bytes, and its place %d", st.Size(), size)
	}
	if err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

// openDisk opens a disk for one machine: the lock ends with the last descriptor of this
// opening, which is QEMU's.
func openDisk(name string, size int64) (*os.File, error) {
	f, err := openAtMost(name, os.O_RDWR, size)
	return lockDisk(name, f, err)
}

// openOverlay is openDisk for one that grows.
func openOverlay(name string) (*os.File, error) {
	f, err := openRegular(name, os.O_RDWR)
	return lockDisk(name, f, err)
}

func lockDisk(name string, f *os.File, err error) (*os.File, error) {
	if err != nil {
		return nil, err
	}
	if err := linux.Flock(f, unix.LOCK_EX|unix.LOCK_NB); err != nil {
		_ = f.Close()
		return nil, dsec.Errorf(dsec.Conflict, "open", name, "another machine has this disk: %w", err)
	}
	return f, nil
}

// openRegular waits for nobody: a FIFO at the place is refused.
func openRegular(name string, flags int) (*os.File, error) {
	f, err := os.OpenFile(name, flags|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, dsec.E(fault.Class(err, dsec.Internal), "open", name, cause(err))
	}
	if st, err := f.Stat(); err != nil || !st.Mode().IsRegular() {
		_ = f.Close()
		return nil, dsec.E(dsec.Invalid, "open", name, errors.Join(err, errors.New("it is no regular file")))
	}
	return f, nil
}

// cause is err without the path, which the error around it has.
func cause(err error) error {
	if e, ok := errors.AsType[*fs.PathError](err); ok {
		return e.Err
	}
	return err
}

// memory files are seen through /proc/self/fd by a process of another user: their
// mode lets everybody write, and a seal lets nobody.
const (
	sizeSeals  = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW
	writeSeals = sizeSeals | unix.F_SEAL_WRITE | unix.F_SEAL_SEAL
)

// zeros is a file in memory that takes none until it is written.
func zeros(size int64, sealed bool) (*os.File, error) {
	const op, object = "make", "file in memory"
	fd, err := unix.MemfdCreate("dsec-vm", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, dsec.E(dsec.Internal, op, object, os.NewSyscallError("memfd_create", err))
	}
	f := os.NewFile(uintptr(fd), object)
	if err := f.Truncate(size); err != nil {
		_ = f.Close()
		return nil, dsec.E(fault.Class(err, dsec.Internal), op, object, cause(err))
	}
	how := sizeSeals
	if sealed {
		how = writeSeals
	}
	if err := seal(f, how); err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

// emptyDisk is a file of zeros that is open for reading only: QEMU takes no other for a
// disk that is.
func emptyDisk(size int64) (*os.File, error) {
	f, err := zeros(size, true)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	return openRegular(fdPath(int(f.Fd())), os.O_RDONLY)
}

func seal(f *os.File, how int) error {
	if _, err := unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, how); err != nil {
		return dsec.E(dsec.Internal, "seal", "file in memory", err)
	}
	return nil
}

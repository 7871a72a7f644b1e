package diskpool

import (
	"encoding/binary"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Project quotas through the generic interface, which ext4 and XFS share.
const (
	quotaGet     = 0x800007<<8 | quotaProject // QCMD(Q_GETQUOTA, PRJQUOTA)
	quotaSet     = 0x800008<<8 | quotaProject
	quotaProject = 2
	quotaLimits  = 1 // QIF_BLIMITS
	quotaSize    = 72
	quotaBlock   = 1024 // unit of the limit

	getAttributes  = 0x801c581f // FS_IOC_FSGETXATTR
	setAttributes  = 0x401c5820
	attributeSize  = 28
	projectInherit = 0x200 // new files below belong to the project as well
)

// quotactl needs Linux 5.14: earlier ones want the name of a block device.
func quotactl(dir *os.File, command int, id uint32, arg []byte) error {
	_, _, e := unix.Syscall6(unix.SYS_QUOTACTL_FD, dir.Fd(), uintptr(command), uintptr(id), uintptr(unsafe.Pointer(&arg[0])), 0, 0)
	if e != 0 {
		return os.NewSyscallError("quotactl_fd", e)
	}
	return nil
}

func projectUsage(dir *os.File, id uint32) (Usage, error) {
	arg := make([]byte, quotaSize)
	if err := quotactl(dir, quotaGet, id, arg); err != nil {
		return Usage{}, err
	}
	return Usage{Used: int64(binary.NativeEndian.Uint64(arg[16:])), Limit: int64(binary.NativeEndian.Uint64(arg)) * quotaBlock}, nil
}

// limitProject sets the hard limit; 0 is none.
func limitProject(dir *os.File, id uint32, limit int64) error {
	arg := make([]byte, quotaSize)
	binary.NativeEndian.PutUint64(arg, uint64(limit/quotaBlock))
	binary.NativeEndian.PutUint32(arg[64:], quotaLimits)
	return quotactl(dir, quotaSet, id, arg)
}

func projectOf(dir *os.File) (uint32, error) {
	arg := make([]byte, attributeSize)
	if err := ioctl(dir, getAttributes, arg); err != nil {
		return 0, &os.PathError{Op: "get project of", Path: dir.Name(), Err: err}
	}
	return binary.NativeEndian.Uint32(arg[12:]), nil
}

func setProject(dir *os.File, id uint32) error {
	arg := make([]byte, attributeSize)
	if err := ioctl(dir, getAttributes, arg); err != nil {
		return &os.PathError{Op: "get project of", Path: dir.Name(), Err: err}
	}
	flags := binary.NativeEndian.Uint32(arg) | projectInherit
	binary.NativeEndian.PutUint32(arg, flags)
	binary.NativeEndian.PutUint32(arg[12:], id)
	if err := ioctl(dir, setAttributes, arg); err != nil {
		return &os.PathError{Op: "set project of", Path: dir.Name(), Err: err}
	}
	return nil
}

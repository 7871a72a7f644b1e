package diskpool

import (
	"encoding/binary"
	"encoding/hex"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Requests of <linux/btrfs.h>. All have the magic 0x94; _IOW is 1<<30, _IOR
// 2<<30, _IOWR both; the size of the argument is at bit 16.
const (
	ctlSubvolCreate = 1<<30 | 4096<<16 | 0x94<<8 | 14
	ctlSubvolDelete = 1<<30 | 4096<<16 | 0x94<<8 | 15
	ctlTreeSearch   = 3<<30 | 4096<<16 | 0x94<<8 | 17
	ctlInodeLookup  = 3<<30 | 4096<<16 | 0x94<<8 | 18
	ctlResize       = 1<<30 | 4096<<16 | 0x94<<8 | 3
	ctlStartSync    = 2<<30 | 8<<16 | 0x94<<8 | 24
	ctlFilesystem   = 2<<30 | 1024<<16 | 0x94<<8 | 31
	ctlQuota        = 3<<30 | 16<<16 | 0x94<<8 | 40
	ctlSnapCreate   = 1<<30 | 4096<<16 | 0x94<<8 | 23
	ctlGroupCreate  = 1<<30 | 16<<16 | 0x94<<8 | 42
	ctlGroupLimit   = 2<<30 | 48<<16 | 0x94<<8 | 43

	quotaEnable       = 1
	quotaEnableSimple = 4 // Linux 6.7
	limitReferenced   = 1 // BTRFS_QGROUP_LIMIT_MAX_RFER
	rootObject        = 256
	rootTree          = 1
	rootItem          = 132
)

func ioctl(f *os.File, request uintptr, arg []byte) error {
	for {
		_, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), request, uintptr(unsafe.Pointer(&arg[0])))
		if errno == 0 {
			return nil
		}
		if errno != unix.EINTR {
			return errno
		}
	}
}

// named is struct btrfs_ioctl_vol_args.
func named(name string) []byte {
	arg := make([]byte, 4096)
	copy(arg[8:4095], name)
	return arg
}

func createSubvolume(parent *os.File, name string) error {
	if err := ioctl(parent, ctlSubvolCreate, named(name)); err != nil {
		return &os.PathError{Op: "create subvolume", Path: name, Err: err}
	}
	return nil
}

// snapshotSubvolume is struct btrfs_ioctl_vol_args_v2.
func snapshotSubvolume(parent, from *os.File, name string) error {
	const flags, nameAt, readOnly = 16, 56, 1 << 1
	arg := make([]byte, 4096)
	binary.NativeEndian.PutUint64(arg, uint64(from.Fd()))
	binary.NativeEndian.PutUint64(arg[flags:], readOnly)
	copy(arg[nameAt:4095], name)
	if err := ioctl(parent, ctlSnapCreate, arg); err != nil {
		return &os.PathError{Op: "snapshot subvolume", Path: name, Err: err}
	}
	return nil
}

func deleteSubvolume(parent *os.File, name string) error {
	if err := ioctl(parent, ctlSubvolDelete, named(name)); err != nil {
		return &os.PathError{Op: "delete subvolume", Path: name, Err: err}
	}
	return nil
}

// subvolumeID is also the id of the quota group of level 0.
func subvolumeID(dir *os.File) (uint64, error) {
	arg := make([]byte, 4096)
	binary.NativeEndian.PutUint64(arg[8:], rootObject)
	if err := ioctl(dir, ctlInodeLookup, arg); err != nil {
		return 0, &os.PathError{Op: "look up subvolume", Path: dir.Name(), Err: err}
	}
	return binary.NativeEndian.Uint64(arg), nil
}

func setQuota(root *os.File, command uint64) error {
	arg := make([]byte, 16)
	binary.NativeEndian.PutUint64(arg, command)
	return ioctl(root, ctlQuota, arg)
}

func limitGroup(root *os.File, id uint64, limit int64) error {
	arg := make([]byte, 48)
	for i, v := range []uint64{id, limitReferenced, uint64(limit)} {
		binary.NativeEndian.PutUint64(arg[8*i:], v)
	}
	if err := ioctl(root, ctlGroupLimit, arg); err != nil {
		return &os.PathError{Op: "limit quota group of", Path: root.Name(), Err: err}
	}
	return nil
}

func destroyGroup(root *os.File, id uint64) error {
	arg := make([]byte, 16)
	binary.NativeEndian.PutUint64(arg[8:], id)
	return ioctl(root, ctlGroupCreate, arg)
}

// filesystemID is the name of the file system below /sys/fs/btrfs.
func filesystemID(root *os.File) (string, error) {
	arg := make([]byte, 1024)
	if err := ioctl(root, ctlFilesystem, arg); err != nil {
		return "", &os.PathError{Op: "look at file system", Path: root.Name(), Err: err}
	}
	x := hex.EncodeToString(arg[16:32])
	return x[:8] + "-" + x[8:12] + "-" + x[12:16] + "-" + x[16:20] + "-" + x[20:], nil
}

func growToDevice(root *os.File) error {
	if err := ioctl(root, ctlResize, named("max")); err != nil {
		return &os.PathError{Op: "grow file system", Path: root.Name(), Err: err}
	}
	return nil
}

// startCommit asks the kernel to write its metadata soon.
func startCommit(root *os.File) error { return ioctl(root, ctlStartSync, make([]byte, 8)) }

// subvolumeExists reports whether a subvolume has blocks, which is for some
// time after its deletion.
func subvolumeExists(root *os.File, id uint64) (bool, error) {
	arg := make([]byte, 4096)
	const most = ^uint64(0)
	for i, v := range []uint64{rootTree, id, id, 0, most, 0, most} { // tree, then min and max of object, offset and transaction
		binary.NativeEndian.PutUint64(arg[8*i:], v)
	}
	for i, v := range []uint32{rootItem, rootItem, 1} { // min and max type, number wanted and found
		binary.NativeEndian.PutUint32(arg[56+4*i:], v)
	}
	if err := ioctl(root, ctlTreeSearch, arg); err != nil {
		return false, &os.PathError{Op: "look for subvolumes of", Path: root.Name(), Err: err}
	}
	return binary.NativeEndian.Uint32(arg[64:]) > 0, nil
}

package rootfs

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/linux"
)

// mountErofs mounts metadata and data detached: from the files where the kernel
// can (6.12), else through loop devices that vanish with the mount.
func mountErofs(metaPath string, data Device, forceLoop bool) (*os.File, error) {
	if !forceLoop {
		m, err := erofsFrom(metaPath, data.Path)
		if !errors.Is(err, unix.ENOTBLK) {
			return m, err
		}
	}
	if data.NoLoop {
		return nil, dsec.Errorf(dsec.Unsupported, "read layer through a loop device", data.Path,
			"%s sees no reads of it, and this kernel mounts no files (CONFIG_EROFS_FS_BACKED_BY_FILE)", data.Kind)
	}
	meta, err := loopOf(metaPath, false)
	if err != nil {
		return nil, err
	}
	defer meta.Close()
	if data.Path == "" {
		return erofsFrom(meta.Name(), "")
	}
	dev, err := loopOf(data.Path, data.Kind != "")
	if err != nil {
		return nil, err
	}
	defer dev.Close()
	return erofsFrom(meta.Name(), dev.Name())
}

// openQuietly opens without the runtime, which would wait for events of a file
// that somebody else has to answer for.
func openQuietly(path string) (*os.File, error) {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	return os.NewFile(uintptr(fd), path), nil
}

func loopOf(path string, direct bool) (*os.File, error) {
	f, err := openQuietly(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return linux.Loop(f, direct)
}

func erofsFrom(meta, data string) (*os.File, error) {
	fs := linux.NewFS("erofs").String("source", meta).Flag("ro")
	if data != "" {
		fs.String("device", data)
	}
	return fs.Mount(unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOATIME)
}

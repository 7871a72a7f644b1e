package rootfs

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/linux"
)

// mountErofs mounts metadata and data detached: from the files where the kernel
// can (6.12), else through loop devices that vanish with the mount.
func mountErofs(metaPath, dataPath string, forceLoop bool) (*os.File, error) {
	if !forceLoop {
		m, err := erofsFrom(metaPath, dataPath)
		if !errors.Is(err, unix.ENOTBLK) {
			return m, err
		}
	}
	meta, err := loopOf(metaPath)
	if err != nil {
		return nil, err
	}
	defer meta.Close()
	if dataPath == "" {
		return erofsFrom(meta.Name(), "")
	}
	data, err := loopOf(dataPath)
	if err != nil {
		return nil, err
	}
	defer data.Close()
	return erofsFrom(meta.Name(), data.Name())
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

func loopOf(path string) (*os.File, error) {
	f, err := openQuietly(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return linux.Loop(f)
}

func erofsFrom(meta, data string) (*os.File, error) {
	fs := linux.NewFS("erofs").String("source", meta).Flag("ro")
	if data != "" {
		fs.String("device", data)
	}
	return fs.Mount(unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOATIME)
}

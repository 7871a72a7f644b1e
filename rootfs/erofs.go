package rootfs

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/linux"
	"github.com/opendsec/dsec/layer"
)

// mountErofs mounts a layer detached: from its files where the kernel can
// (6.12), else through loop devices that vanish with the mount.
func mountErofs(l layer.Local, forceLoop bool) (*os.File, error) {
	if !forceLoop {
		m, err := erofsFrom(l.Meta, l.Data)
		if !errors.Is(err, unix.ENOTBLK) {
			return m, err
		}
	}
	meta, err := loopOf(l.Meta)
	if err != nil {
		return nil, err
	}
	defer meta.Close()
	if l.Data == "" {
		return erofsFrom(meta.Name(), "")
	}
	data, err := loopOf(l.Data)
	if err != nil {
		return nil, err
	}
	defer data.Close()
	return erofsFrom(meta.Name(), data.Name())
}

func loopOf(path string) (*os.File, error) {
	f, err := os.Open(path)
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

package diskpool

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
)

// loDirectIO is LO_FLAGS_DIRECT_IO of <linux/loop.h>.
const loDirectIO = 16

// attachLoop makes a block device of a file. The device lets go of the file
// by itself when its last user closes it. If another device has the file
// already, that one is used: two would destroy the file system in it.
func attachLoop(file string) (*os.File, error) {
	if dev, err := loopOf(file); dev != nil || err != nil {
		return dev, err
	}
	f, err := os.OpenFile(file, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		return nil, dsec.E(dsec.Unsupported, "attach loop device to", file, err)
	}
	defer func() { _ = control.Close() }()
	for range 100 { // another process may take the free number first
		n, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return nil, dsec.E(dsec.Unsupported, "find a free loop device for", file, err)
		}
		dev, err := os.OpenFile("/dev/loop"+strconv.Itoa(n), os.O_RDWR, 0)
		if err != nil {
			return nil, dsec.E(dsec.Unsupported, "open loop device for", file, err)
		}
		if err = configureLoop(dev, f, file); err == nil {
			return dev, nil
		}
		_ = dev.Close()
		if !errors.Is(err, unix.EBUSY) {
			return nil, fmt.Errorf("attach %s to %s: %w", dev.Name(), file, err)
		}
	}
	return nil, fmt.Errorf("attach loop device to %s: %w", file, unix.EBUSY)
}

func configureLoop(dev, f *os.File, file string) error {
	c := unix.LoopConfig{Fd: uint32(f.Fd())}
	c.Info.Flags = unix.LO_FLAGS_AUTOCLEAR | loDirectIO
	copy(c.Info.File_name[:len(c.Info.File_name)-1], file)
	err := unix.IoctlLoopConfigure(int(dev.Fd()), &c)
	if errors.Is(err, unix.EINVAL) { // no direct I/O on this file system: data is cached twice
		c.Info.Flags = unix.LO_FLAGS_AUTOCLEAR
		err = unix.IoctlLoopConfigure(int(dev.Fd()), &c)
	}
	return err
}

// loopOf finds the loop device that has a file, nil if none has.
func loopOf(file string) (*os.File, error) {
	var want unix.Stat_t
	if err := unix.Stat(file, &want); err != nil {
		return nil, &os.PathError{Op: "stat", Path: file, Err: err}
	}
	attached, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		return nil, err
	}
	for _, a := range attached {
		name := strings.Split(a, "/")[3]
		dev, err := os.OpenFile("/dev/"+name, os.O_RDWR, 0)
		if err != nil {
			continue
		}
		st, err := unix.IoctlLoopGetStatus64(int(dev.Fd()))
		if err == nil && st.Device == want.Dev && st.Inode == want.Ino {
			return dev, nil
		}
		_ = dev.Close()
	}
	return nil, nil
}

// mountDetached mounts a file system in no namespace and returns the mount's
// descriptor, which is O_PATH. Options without '=' are flags.
func mountDetached(fstype, source string, options ...string) (*os.File, error) {
	fail := func(what string, fd int, err error) error {
		return fmt.Errorf("%s %s on %s: %w%s", what, fstype, source, err, mountLog(fd))
	}
	fd, err := unix.Fsopen(fstype, unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, dsec.Errorf(dsec.Unsupported, "mount", source, "the kernel has no %s: %w", fstype, err)
	}
	defer func() { _ = unix.Close(fd) }()
	if err := unix.FsconfigSetString(fd, "source", source); err != nil {
		return nil, fail("set source of", fd, err)
	}
	for _, o := range options {
		if k, v, ok := strings.Cut(o, "="); ok {
			err = unix.FsconfigSetString(fd, k, v)
		} else {
			err = unix.FsconfigSetFlag(fd, o)
		}
		if err != nil {
			return nil, fail("set option "+o+" of", fd, err)
		}
	}
	if err := unix.FsconfigCreate(fd); err != nil {
		return nil, fail("mount", fd, err)
	}
	m, err := unix.Fsmount(fd, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NOATIME)
	if err != nil {
		return nil, fail("mount", fd, err)
	}
	return os.NewFile(uintptr(m), "mount:"+source), nil
}

// rootOf opens the root directory of a detached mount for reading. The mount
// itself ends when its own descriptor closes, so that is kept as well.
func rootOf(mount *os.File) (*os.File, error) { return openDirAt(mount, ".") }

// mountLog is what the kernel says about a refused mount.
func mountLog(fd int) string {
	buf := make([]byte, 512)
	n, err := unix.Read(fd, buf)
	if err != nil || n <= 0 {
		return ""
	}
	return " (" + strings.TrimSpace(string(buf[:n])) + ")"
}

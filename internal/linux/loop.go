package linux

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Loop attaches a regular file to a free loop device, read-only, and returns
// the open device; its Name is the device's path. The device lets go of the
// file by itself when its last user, mounts included, is gone.
//
// It reads one piece after the other. Direct has it read many at a time, past the
// page cache of the file, where the file system of the file can do that: one that
// waits for somebody's answer then holds up no other.
func Loop(backing *os.File, direct bool) (*os.File, error) {
	// The size of a device is what the kernel knows of the file, which before 6.16
	// is nothing if its file system is another process that was never asked.
	if _, err := backing.Stat(); err != nil {
		return nil, err
	}
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer control.Close()
	cfg := unix.LoopConfig{Fd: uint32(backing.Fd()), Size: 512}
	cfg.Info.Flags = unix.LO_FLAGS_READ_ONLY | unix.LO_FLAGS_AUTOCLEAR
	if direct {
		cfg.Info.Flags |= unix.LO_FLAGS_DIRECT_IO
	}
	copy(cfg.Info.File_name[:len(cfg.Info.File_name)-1], backing.Name())
	for tries := 0; ; tries++ {
		n, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return nil, os.NewSyscallError("find free loop device", err)
		}
		dev, err := os.OpenFile(fmt.Sprintf("/dev/loop%d", n), os.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			return nil, err
		}
		err = retry(func() error { return unix.IoctlLoopConfigure(int(dev.Fd()), &cfg) })
		if err == nil {
			return dev, nil
		}
		dev.Close()
		// Somebody else took it between the two calls, as anybody may who attaches
		// many at one time.
		if !errors.Is(err, unix.EBUSY) || tries >= 1024 {
			return nil, &os.PathError{Op: "attach " + backing.Name() + " to", Path: dev.Name(), Err: err}
		}
	}
}

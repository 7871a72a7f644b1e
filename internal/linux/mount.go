package linux

import (
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// Clone returns a detached copy of the mount that tree is in, beginning at
// tree; with recursive, of the mounts below it too. Cloning from a detached
// mount needs Linux 6.15.
func Clone(tree *os.File, recursive bool) (*os.File, error) {
	flags := uint(unix.OPEN_TREE_CLONE | unix.OPEN_TREE_CLOEXEC | unix.AT_EMPTY_PATH)
	if recursive {
		flags |= unix.AT_RECURSIVE
	}
	fd, err := unix.OpenTree(int(tree.Fd()), "", flags)
	return file(fd, err, "clone mount", tree.Name())
}

// IDMap makes the detached mount show ids as the user namespace maps them. It
// works once for a mount, before it is attached.
func IDMap(mount, userns *os.File) error {
	attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_IDMAP, Userns_fd: uint64(userns.Fd())}
	return setattr(mount, 0, &attr, "idmap mount")
}

// SetMountAttr sets attributes (unix.MOUNT_ATTR_*) of a mount.
func SetMountAttr(mount *os.File, set uint64) error {
	return setattr(mount, 0, &unix.MountAttr{Attr_set: set}, "set attributes of mount")
}

// SetMountAttrAll sets attributes of a mount and of all below it.
func SetMountAttrAll(mount *os.File, set uint64) error {
	return setattr(mount, unix.AT_RECURSIVE, &unix.MountAttr{Attr_set: set}, "set attributes of mount")
}

func setattr(mount *os.File, flags uint, attr *unix.MountAttr, op string) error {
	err := retry(func() error {
		return unix.MountSetattr(int(mount.Fd()), "", unix.AT_EMPTY_PATH|flags, attr)
	})
	if err != nil {
		return &os.PathError{Op: op, Path: mount.Name(), Err: err}
	}
	return nil
}

// Move attaches a detached mount at a path below dir (nil: the working directory).
func Move(mount, dir *os.File, path string) error {
	err := unix.MoveMount(int(mount.Fd()), "", dirfd(dir), path, unix.MOVE_MOUNT_F_EMPTY_PATH)
	if err != nil {
		return &os.PathError{Op: "attach mount", Path: path, Err: err}
	}
	return nil
}

func dirfd(dir *os.File) int {
	if dir == nil {
		return unix.AT_FDCWD
	}
	return int(dir.Fd())
}

// FS is a file system being configured. The first error sticks and is what
// Mount returns, with the kernel's own words if it said any.
type FS struct {
	f    *os.File
	kind string
	err  error
}

// NewFS opens a configuration for a file system type.
func NewFS(kind string) *FS {
	fd, err := unix.Fsopen(kind, unix.FSOPEN_CLOEXEC)
	f, err := file(fd, err, "open file system", kind)
	return &FS{f: f, kind: kind, err: err}
}

func (c *FS) try(what string, f func(fd int) error) *FS {
	if c.err != nil {
		return c
	}
	if err := retry(func() error { return f(int(c.f.Fd())) }); err != nil {
		c.err = fmt.Errorf("configure %s %s: %w%s", c.kind, what, err, c.said())
	}
	return c
}

// Flag sets an option without a value.
func (c *FS) Flag(key string) *FS {
	return c.try(key, func(fd int) error { return unix.FsconfigSetFlag(fd, key) })
}

// String sets an option.
func (c *FS) String(key, value string) *FS {
	return c.try(key+"="+value, func(fd int) error { return unix.FsconfigSetString(fd, key, value) })
}

// FD sets an option to an open file.
func (c *FS) FD(key string, f *os.File) *FS {
	return c.try(key, func(fd int) error { return unix.FsconfigSetFd(fd, key, int(f.Fd())) })
}

// Mount creates the file system and returns a detached mount of it with the
// given attributes (unix.MOUNT_ATTR_*). The configuration is used up.
func (c *FS) Mount(attrs int) (*os.File, error) {
	c.try("create", unix.FsconfigCreate)
	if c.f != nil {
		defer c.f.Close()
	}
	if c.err != nil {
		return nil, c.err
	}
	var fd int
	err := retry(func() (err error) {
		fd, err = unix.Fsmount(int(c.f.Fd()), unix.FSMOUNT_CLOEXEC, attrs)
		return err
	})
	return file(fd, err, "mount", c.kind)
}

// said reads what the kernel wrote to the configuration's log.
func (c *FS) said() string {
	var words []string
	buf := make([]byte, 1024)
	for {
		n, err := unix.Read(int(c.f.Fd()), buf)
		if err != nil || n <= 0 {
			break
		}
		words = append(words, strings.TrimSpace(string(buf[:n])))
	}
	if len(words) == 0 {
		return ""
	}
	return " (" + strings.Join(words, "; ") + ")"
}

// Discard ends a configuration; after Mount it does nothing.
func (c *FS) Discard() {
	if c.f != nil {
		_ = c.f.Close()
	}
}

// Err is the first error so far.
func (c *FS) Err() error { return c.err }

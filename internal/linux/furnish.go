package linux

import (
	"errors"
	"os"
	"path"

	"golang.org/x/sys/unix"
)

// MakeDirs opens a directory below root, links followed there and nowhere else,
// and makes what of it is missing, for that owner.
func MakeDirs(root *os.File, name string, uid, gid int) (*os.File, error) {
	const flags = unix.O_RDONLY | unix.O_DIRECTORY
	d, err := OpenIn(root, name, flags)
	if err == nil || !errors.Is(err, unix.ENOENT) {
		return d, err
	}
	parent, last := path.Split(path.Clean(name))
	if last == "" || last == ".." {
		return nil, err
	}
	p, err := MakeDirs(root, parent, uid, gid)
	if err != nil {
		return nil, err
	}
	defer p.Close()
	if err := unix.Mkdirat(int(p.Fd()), last, 0o755); err != nil {
		return nil, &os.PathError{Op: "mkdir", Path: name, Err: err} // EEXIST: a dangling link
	}
	if err := unix.Fchownat(int(p.Fd()), last, uid, gid, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return nil, &os.PathError{Op: "chown", Path: name, Err: err}
	}
	return OpenBeneath(p, last, flags)
}

// ReplaceFile puts a new file in place of whatever is there in a directory, a link
// included. Where nothing is and nothing is to be said, nothing is made.
func ReplaceFile(dir *os.File, name string, content []byte, uid, gid int) error {
	fd := int(dir.Fd())
	err := unix.Unlinkat(fd, name, 0)
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return err
	}
	if err != nil && len(content) == 0 {
		return nil
	}
	n, err := unix.Openat(fd, name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_CLOEXEC, 0o644)
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(n), name)
	defer f.Close()
	if _, err := f.Write(content); err != nil {
		return err
	}
	return f.Chown(uid, gid)
}

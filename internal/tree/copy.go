package tree

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/linux"
)

// maxDepth of directories below a place, one descriptor on each side each. Deeper
// ones can be made inside a sandbox, and nothing works on them.
const maxDepth = 1024

// Place is a name in an open directory.
type Place struct {
	Dir  *os.File
	Name string
}

func (p Place) fd() int { return int(p.Dir.Fd()) }

// file identifies a file that has several names.
type file struct{ dev, ino uint64 }

func fileOf(st *unix.Stat_t) file { return file{uint64(st.Dev), st.Ino} }

// Lstat of what is there.
func (p Place) Lstat() (st unix.Stat_t, err error) {
	err = unix.Fstatat(p.fd(), p.Name, &st, unix.AT_SYMLINK_NOFOLLOW)
	return st, wrap("stat", p.Name, err)
}

func wrap(op, path string, err error) error {
	if err == nil {
		return nil
	}
	if _, ok := errors.AsType[*os.PathError](err); ok {
		return err
	}
	return &os.PathError{Op: op, Path: path, Err: err}
}

type copier struct {
	to   *os.File
	seen map[file]string // first copy of a file with several names, below to
	size names
}

// Copy makes to, which must not be there, like from. Hard links between files below
// from become such between the copies.
func Copy(from, to Place) error {
	c := &copier{to: to.Dir, seen: map[file]string{}}
	return c.copy(from, to, to.Name, 0)
}

// copy makes to, which is at this path below the place of all.
func (c *copier) copy(from, to Place, at string, depth int) error {
	st, err := from.Lstat()
	if err != nil {
		return err
	}
	kind := st.Mode & unix.S_IFMT
	if kind != unix.S_IFDIR && st.Nlink > 1 {
		if first, ok := c.seen[fileOf(&st)]; ok {
			return c.link(first, to)
		}
	}
	switch kind {
	case unix.S_IFDIR:
		return c.copyDir(from, to, at, &st, depth)
	case unix.S_IFREG:
		err = copyFile(from, to)
	case unix.S_IFLNK:
		err = copyLink(from, to, st.Size)
	default:
		err = wrap("mknod", to.Name, unix.Mknodat(to.fd(), to.Name, st.Mode&^0o7777|0o600, int(st.Rdev)))
	}
	if err == nil {
		err = likeOld(from, to, &st)
	}
	if err == nil && st.Nlink > 1 {
		c.seen[fileOf(&st)] = at
		err = c.size.add(at)
	}
	return err
}

// link gives a copy another name.
func (c *copier) link(first string, to Place) error {
	dir, err := openBelow(c.to, path.Dir(first))
	if err != nil {
		return err
	}
	defer dir.Close()
	return wrap("link", to.Name, unix.Linkat(int(dir.Fd()), path.Base(first), to.fd(), to.Name, 0))
}

func (c *copier) copyDir(from, to Place, at string, st *unix.Stat_t, depth int) error {
	if depth == maxDepth {
		return wrap("copy", from.Name, unix.ELOOP)
	}
	src, err := openDir(from)
	if err != nil {
		return err
	}
	defer src.Close()
	if err := unix.Mkdirat(to.fd(), to.Name, 0o700); err != nil {
		return wrap("mkdir", to.Name, err)
	}
	dst, err := openDir(to)
	if err != nil {
		return err
	}
	defer dst.Close()
	names, err := src.Readdirnames(-1)
	if err != nil {
		return err
	}
	for _, n := range names {
		if err := c.copy(Place{src, n}, Place{dst, n}, at+"/"+n, depth+1); err != nil {
			return below(from.Name, err)
		}
	}
	return likeOld(from, to, st)
}

// below puts a directory before the path of an error.
func below(dir string, err error) error {
	if p, ok := errors.AsType[*os.PathError](err); ok {
		p.Path = dir + "/" + p.Path
	}
	return err
}

func openAt(p Place, flags int) (*os.File, error) {
	how := &unix.OpenHow{Flags: uint64(flags) | unix.O_CLOEXEC | unix.O_NOFOLLOW, Resolve: unix.RESOLVE_NO_XDEV | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_BENEATH}
	fd, err := unix.Openat2(p.fd(), p.Name, how)
	if err != nil {
		return nil, wrap("open", p.Name, err)
	}
	return os.NewFile(uintptr(fd), p.Name), nil
}

// openBelow opens a directory by a path of any length.
func openBelow(dir *os.File, at string) (*os.File, error) {
	var last *os.File
	for _, part := range linux.Steps(at) {
		next, err := openAt(Place{dir, part}, unix.O_RDONLY|unix.O_DIRECTORY)
		if last != nil {
			last.Close()
		}
		if err != nil {
			return nil, err
		}
		dir, last = next, next
	}
	return last, nil
}

func openDir(p Place) (*os.File, error) {
	return openAt(p, unix.O_RDONLY|unix.O_DIRECTORY)
}

func copyFile(from, to Place) error {
	src, err := openAt(from, unix.O_RDONLY|unix.O_NONBLOCK)
	if err != nil {
		return err
	}
	defer src.Close()
	fd, err := unix.Openat(to.fd(), to.Name, unix.O_RDWR|unix.O_CREAT|unix.O_EXCL|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return wrap("create", to.Name, err)
	}
	dst := os.NewFile(uintptr(fd), to.Name)
	defer dst.Close()
	return copyData(src, dst)
}

// copyData leaves out what is a hole.
func copyData(src, dst *os.File) error {
	st, err := src.Stat()
	if err != nil {
		return err
	}
	if err := dst.Truncate(st.Size()); err != nil {
		return err
	}
	for at := int64(0); at < st.Size(); {
		begin, err := unix.Seek(int(src.Fd()), at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) { // only a hole is left
			return nil
		}
		end := st.Size()
		if err != nil {
			begin = at // it cannot tell
		} else if end, err = unix.Seek(int(src.Fd()), begin, unix.SEEK_HOLE); err != nil {
			return wrap("seek", src.Name(), err)
		}
		n, err := io.Copy(io.NewOffsetWriter(dst, begin), io.NewSectionReader(src, begin, end-begin))
		if err == nil && n != end-begin {
			err = wrap("read", src.Name(), io.ErrUnexpectedEOF)
		}
		if err != nil {
			return err
		}
		at = end
	}
	return nil
}

func copyLink(from, to Place, size int64) error {
	buf := make([]byte, max(size, 4095)+1)
	n, err := unix.Readlinkat(from.fd(), from.Name, buf)
	if err != nil {
		return wrap("readlink", from.Name, err)
	}
	return wrap("symlink", to.Name, unix.Symlinkat(string(buf[:n]), to.fd(), to.Name))
}

// likeOld gives to the owner, mode, attributes and times of from.
func likeOld(from, to Place, st *unix.Stat_t) error {
	if err := unix.Fchownat(to.fd(), to.Name, int(st.Uid), int(st.Gid), unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return wrap("chown", to.Name, err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFLNK { // after the owner, which takes setuid away
		if err := chmod(to, st.Mode&0o7777); err != nil {
			return err
		}
	}
	if err := copyAttributes(from, to); err != nil {
		return err
	}
	times := []unix.Timespec{st.Atim, st.Mtim}
	return wrap("set times of", to.Name, unix.UtimesNanoAt(to.fd(), to.Name, times, unix.AT_SYMLINK_NOFOLLOW))
}

// chmod without a link on the way.
func chmod(p Place, mode uint32) error {
	f, err := openAt(p, unix.O_PATH)
	if err != nil {
		return err
	}
	defer f.Close()
	return wrap("chmod", p.Name, unix.Chmod(procPath(f), mode))
}

// procPath is by which what is open can be named.
func procPath(f *os.File) string { return fmt.Sprintf("/proc/self/fd/%d", f.Fd()) }

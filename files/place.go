package files

import (
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
)

// place is an entry by its directory, held open, and its name in it. The entry
// need not exist. What happens to names elsewhere meanwhile does not matter.
type place struct {
	dir  *os.File
	name string // never empty, "." or ".."
	path string // that led here, links of the last component followed
}

func (p place) close() { p.dir.Close() }

func (p place) lstat() (unix.Stat_t, error) { return lstatAt(p.dir, p.name) }

// owner of what is made on the way; nil keeps the asking user.
type owner struct{ uid, gid *uint32 }

// check refuses the number that means "keep" to chown(2).
func (o owner) check(op, path string) error {
	for _, id := range []*uint32{o.uid, o.gid} {
		if id != nil && *id == noID {
			return invalid(op, path, "owner %d is nobody's number", *id)
		}
	}
	return nil
}

// place finds the place of a path whose last component is not followed. With
// parents missing directories are made, 0755, and given to o.
func (l *Local) place(op, path string, parents bool, o owner) (place, error) {
	dir, name := split(path)
	if name == "" || name == "." || name == ".." {
		if op == opWrite {
			return place{}, dsec.E(dsec.IsADirectory, op, dsec.Quote(path), unix.EISDIR)
		}
		return place{}, invalid(op, path, "names no entry of a directory")
	}
	d, err := l.openPath(dir, true)
	if missing(err) && parents {
		d, err = l.makeAll(dir, o)
	}
	if err != nil {
		return place{}, fail(op, path, err)
	}
	st, err := fstat(d)
	if err == nil && kindOf(st.Mode) != Dir {
		err = unix.ENOTDIR
	}
	if err != nil {
		d.Close()
		return place{}, fail(op, path, err)
	}
	return place{dir: d, name: name, path: path}, nil
}

// target is place for a path whose last component is followed if it is a
// symbolic link, also to nothing.
func (l *Local) target(op, path string, parents bool, o owner) (place, error) {
	asked := path
	for range 40 {
		p, err := l.place(op, path, parents, o)
		if err != nil {
			return p, err
		}
		to, err := readlink(p.dir, p.name)
		if err != nil { // not a link, or nothing there
			return p, nil
		}
		p.close()
		if dir, _ := split(path); !strings.HasPrefix(to, "/") {
			to = strings.TrimSuffix(dir, "/") + "/" + to
		}
		if len(to) >= maxPath {
			return place{}, fail(op, asked, unix.ENAMETOOLONG)
		}
		path = to
	}
	return place{}, fail(op, asked, unix.ELOOP)
}

// split cuts the last component off. A trailing slash makes it empty, except
// after trimming for directories, which callers do themselves.
func split(path string) (dir, name string) {
	i := strings.LastIndexByte(path, '/')
	return path[:i+1], path[i+1:]
}

// trimSlash removes slashes at the end of a path that names a directory.
func trimSlash(path string) string {
	if t := strings.TrimRight(path, "/"); t != "" {
		return t
	}
	return "/"
}

func readlink(dir *os.File, name string) (string, error) {
	buf := make([]byte, maxPath)
	n, err := unix.Readlinkat(int(dir.Fd()), name, buf)
	if err != nil {
		return "", err
	}
	return string(buf[:n]), nil
}

// makeAll makes the missing directories of a path and returns the last one.
// Others may do the same at the same time.
func (l *Local) makeAll(path string, o owner) (*os.File, error) {
	path = trimSlash(path)
	for end := 1; end <= len(path); end++ {
		if end < len(path) && path[end] != '/' || path[end-1] == '/' {
			continue
		}
		d, err := l.openPath(path[:end], true)
		if err == nil {
			d.Close()
			continue
		}
		if !missing(err) {
			return nil, err
		}
		if err := l.makeOne(path[:end], o); err != nil {
			return nil, err
		}
	}
	return l.openPath(path, true)
}

func (l *Local) makeOne(path string, o owner) error {
	dir, name := split(path)
	d, err := l.openPath(dir, true)
	if err != nil {
		return err
	}
	defer d.Close()
	err = makeDir(d, name, 0o755, o)
	if err == unix.EEXIST { // made by another, or a dangling link
		if st, err := lstatAt(d, name); err == nil && kindOf(st.Mode) == Symlink {
			return unix.ENOENT
		}
		return nil
	}
	return err
}

// makeDir makes a directory with exactly this mode and owner.
func makeDir(dir *os.File, name string, mode uint32, o owner) error {
	if err := unix.Mkdirat(int(dir.Fd()), name, mode&0o777|0o700); err != nil {
		return err
	}
	d, err := child(dir, name, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return err
	}
	defer d.Close()
	if err := chownFile(d, o); err != nil {
		_ = unix.Unlinkat(int(dir.Fd()), name, unix.AT_REMOVEDIR)
		return err
	}
	return unix.Fchmod(int(d.Fd()), mode&0o7777)
}

func chownFile(f *os.File, o owner) error {
	if o.uid == nil && o.gid == nil {
		return nil
	}
	return unix.Fchown(int(f.Fd()), o.id(o.uid), o.id(o.gid))
}

// id as chown(2) wants it: -1 keeps.
func (owner) id(p *uint32) int {
	if p == nil {
		return -1
	}
	return int(*p)
}

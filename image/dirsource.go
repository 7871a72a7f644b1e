package image

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/image/erofs"
	"github.com/opendsec/dsec/internal/linux"
)

// dirLayer is a directory of this machine, as it is: a file called .wh.x is a
// file called .wh.x. No symbolic link below it is followed.
type dirLayer struct{ root string }

func (l dirLayer) whiteouts() bool { return false }

func (l dirLayer) each(ctx context.Context, fn func(*entry, io.Reader) error) error {
	// A link to the directory itself is fine: the caller named it.
	f, err := os.OpenFile(l.root, os.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	w := dirWalk{fn: fn, first: map[[2]uint64]string{}}
	return w.dir(ctx, f, "")
}

type dirWalk struct {
	fn    func(*entry, io.Reader) error
	first map[[2]uint64]string // device and inode of what has several names
}

func (w *dirWalk) dir(ctx context.Context, f *os.File, name string) error {
	if err := w.emit(f, name, nil); err != nil {
		return err
	}
	names, err := f.Readdirnames(-1)
	if err != nil {
		return err
	}
	slices.Sort(names)
	for _, n := range names {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := w.child(ctx, f, n, path.Join(name, n)); err != nil {
			return err
		}
	}
	return nil
}

// child opens one name without following it, then looks at what it opened.
func (w *dirWalk) child(ctx context.Context, parent *os.File, base, name string) error {
	var st unix.Stat_t
	if err := unix.Fstatat(int(parent.Fd()), base, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return &os.PathError{Op: "stat", Path: name, Err: err}
	}
	flags := unix.O_PATH
	if t := st.Mode & erofs.TypeMask; t == erofs.TypeRegular || t == erofs.TypeDir {
		flags = unix.O_RDONLY | unix.O_NONBLOCK
	}
	fd, err := unix.Openat(int(parent.Fd()), base, flags|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: name, Err: err}
	}
	f := os.NewFile(uintptr(fd), name)
	defer f.Close()
	if st.Mode&erofs.TypeMask == erofs.TypeDir {
		return w.dir(ctx, f, name)
	}
	return w.emit(f, name, &st)
}

// emit reports an open file; listed is what was seen under its name before.
func (w *dirWalk) emit(f *os.File, name string, listed *unix.Stat_t) error {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return &os.PathError{Op: "stat", Path: name, Err: err}
	}
	if listed != nil && (listed.Ino != st.Ino || listed.Mode&erofs.TypeMask != st.Mode&erofs.TypeMask) {
		return fmt.Errorf("%s: changed while it was read", name)
	}
	e := &entry{name: name, mode: st.Mode, uid: st.Uid, gid: st.Gid, mtime: st.Mtim.Sec, nsec: uint32(st.Mtim.Nsec)}
	if st.Nlink > 1 && st.Mode&erofs.TypeMask != erofs.TypeDir {
		key := [2]uint64{st.Dev, st.Ino}
		if first, ok := w.first[key]; ok {
			e.isLink, e.link = true, first
			return w.fn(e, nil)
		}
		w.first[key] = name
	}
	var r io.Reader
	switch st.Mode & erofs.TypeMask {
	case erofs.TypeRegular:
		e.size = st.Size
		r = newHoleReader(f, st.Size)
	case erofs.TypeSymlink:
		buf := make([]byte, erofs.MaxTarget+1)
		n, err := unix.Readlinkat(int(f.Fd()), "", buf)
		if err != nil {
			return &os.PathError{Op: "readlink", Path: name, Err: err}
		}
		e.target = string(buf[:n])
	case erofs.TypeChar, erofs.TypeBlock:
		e.rdev = erofs.Rdev(unix.Major(st.Rdev), unix.Minor(st.Rdev))
	}
	var err error
	if e.xattrs, err = readXattrs(f); err != nil {
		return &os.PathError{Op: "read attributes of", Path: name, Err: err}
	}
	return w.fn(e, r)
}

// readXattrs reads what the format can hold. An attribute that goes away in
// between is not there; any other error is one.
func readXattrs(f *os.File) ([]erofs.Xattr, error) {
	// Through /proc because an O_PATH descriptor refuses the f-calls.
	self := fmt.Sprintf("/proc/self/fd/%d", f.Fd())
	names, err := linux.Growing(func(b []byte) (int, error) { return unix.Listxattr(self, b) })
	if errors.Is(err, unix.ENOTSUP) || errors.Is(err, unix.ENOENT) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var out []erofs.Xattr
	for name := range strings.SplitSeq(strings.TrimSuffix(string(names), "\x00"), "\x00") {
		// A label of this host's policy means nothing elsewhere.
		if !erofs.KnownXattr(name) || name == "security.selinux" {
			continue
		}
		v, err := linux.Growing(func(b []byte) (int, error) { return unix.Getxattr(self, name, b) })
		if errors.Is(err, unix.ENODATA) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		out = append(out, erofs.Xattr{Name: name, Value: v})
	}
	return out, nil
}

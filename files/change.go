package files

import (
	"context"
	"errors"
	"io"
	"os"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
)

// Mkdir implements FS.
func (l *Local) Mkdir(ctx context.Context, path string, mode uint32, parents bool) error {
	if err := check(ctx, opMkdir, path); err != nil {
		return err
	}
	dir := trimSlash(path)
	p, err := l.place(opMkdir, dir, parents, owner{})
	if err == nil {
		err = makeDir(p.dir, p.name, mode, owner{})
		p.close()
	}
	if parents && (errors.Is(err, unix.EEXIST) || dsec.ClassOf(err) == dsec.Invalid) {
		if d, derr := l.openPath(dir+"/", true); derr == nil { // there already, perhaps by a link or "."
			d.Close()
			return nil
		}
	}
	return fail(opMkdir, path, err)
}

// Move implements FS: as rename(2), and across file systems by a copy that is
// complete before the original is removed.
func (l *Local) Move(ctx context.Context, from, to string) error {
	for _, path := range []string{from, to} {
		if err := check(ctx, opMove, path); err != nil {
			return err
		}
	}
	from, to = trimSlash(from), trimSlash(to)
	src, err := l.place(opMove, from, false, owner{})
	if err != nil {
		return err
	}
	defer src.close()
	dst, err := l.place(opMove, to, false, owner{})
	if err != nil {
		return err
	}
	defer dst.close()
	err = unix.Renameat2(int(src.dir.Fd()), src.name, int(dst.dir.Fd()), dst.name, 0)
	switch err {
	case unix.EXDEV:
		return l.moveAcross(ctx, src, dst)
	case unix.EISDIR, unix.ENOTDIR, unix.EEXIST, unix.ENOTEMPTY:
		return dsec.E(dsec.FileExists, opMove, dsec.Quote(to), err)
	}
	return fail(opMove, from, err)
}

// Remove implements FS.
func (l *Local) Remove(ctx context.Context, path string, recursive bool) error {
	if err := check(ctx, opRemove, path); err != nil {
		return err
	}
	p, err := l.place(opRemove, trimSlash(path), false, owner{})
	if err != nil {
		return err
	}
	defer p.close()
	err = unix.Unlinkat(int(p.dir.Fd()), p.name, 0)
	if err == unix.EISDIR && recursive {
		err = removeTree(ctx, p.dir, p.name, 0)
	}
	return fail(opRemove, path, err)
}

// removeTree removes a directory and all below. Entries that vanish or appear
// meanwhile are no error.
func removeTree(ctx context.Context, dir *os.File, name string, level int) error {
	if level >= maxDepth {
		return unix.ENAMETOOLONG
	}
	d, err := child(dir, name, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return err
	}
	defer d.Close()
	for {
		if err := emptyDir(ctx, d, level); err != nil {
			return err
		}
		err := unix.Unlinkat(int(dir.Fd()), name, unix.AT_REMOVEDIR)
		if err != unix.ENOTEMPTY {
			return err
		}
		if _, err := d.Seek(0, io.SeekStart); err != nil { // entries were added, or skipped while others went
			return errno(err)
		}
	}
}

func emptyDir(ctx context.Context, d *os.File, level int) error {
	for {
		names, err := d.Readdirnames(512)
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return errno(err)
		}
		for _, name := range names {
			if err := ctx.Err(); err != nil {
				return err
			}
			err := unix.Unlinkat(int(d.Fd()), name, 0)
			if err == unix.EISDIR {
				err = removeTree(ctx, d, name, level+1)
			}
			if err != nil && !missing(err) {
				return err
			}
		}
	}
}

// SetAttr implements FS; a symbolic link is followed.
func (l *Local) SetAttr(ctx context.Context, path string, a Attr) error {
	if err := check(ctx, opSetAttr, path); err != nil {
		return err
	}
	o := owner{a.UID, a.GID}
	if err := o.check(opSetAttr, path); err != nil {
		return err
	}
	f, err := l.openPath(path, true)
	if err != nil {
		return fail(opSetAttr, path, err)
	}
	defer f.Close()
	fd := int(f.Fd())
	if a.UID != nil || a.GID != nil {
		err = unix.Fchownat(fd, "", o.id(a.UID), o.id(a.GID), unix.AT_EMPTY_PATH)
	}
	if err == nil && a.Mode != nil {
		err = l.chmod(f, path, *a.Mode&0o7777)
	}
	if err == nil && a.MTime != nil {
		err = setMTime(fd, "", *a.MTime, unix.AT_EMPTY_PATH)
	}
	return fail(opSetAttr, path, err)
}

// chmod changes the mode of what f names. Before 6.6 a handle cannot be used,
// and the file is opened.
func (l *Local) chmod(f *os.File, path string, mode uint32) error {
	empty := [1]byte{}
	_, _, e := unix.Syscall6(unix.SYS_FCHMODAT2, f.Fd(), uintptr(unsafe.Pointer(&empty[0])), uintptr(mode), unix.AT_EMPTY_PATH, 0, 0)
	if e != unix.ENOSYS {
		if e != 0 {
			return e
		}
		return nil
	}
	r, err := l.open(path, unix.O_RDONLY)
	if err != nil {
		return err
	}
	defer r.Close()
	return unix.Fchmod(int(r.Fd()), mode)
}

// setMTime leaves the access time.
func setMTime(dir int, name string, t time.Time, flags int) error {
	times := []unix.Timespec{{Nsec: unix.UTIME_OMIT}, {Sec: t.Unix(), Nsec: int64(t.Nanosecond())}}
	return unix.UtimesNanoAt(dir, name, times, flags)
}

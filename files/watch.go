package files

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/linux"
)

const (
	maxWatches = 8192 // directories of one Watch
	watchMask  = unix.IN_CREATE | unix.IN_DELETE | unix.IN_MODIFY | unix.IN_ATTRIB | unix.IN_MOVED_FROM | unix.IN_MOVED_TO |
		unix.IN_DELETE_SELF | unix.IN_ONLYDIR | unix.IN_EXCL_UNLINK
)

// Watch implements Watcher. A directory that appears is reported and, if
// recursive, watched; what it holds already is reported as created, once or
// twice. A move is a remove and a create.
func (l *Local) Watch(ctx context.Context, dir string, recursive bool, fn func(Change) error) error {
	if err := check(ctx, opWatch, dir); err != nil {
		return err
	}
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return fail(opWatch, dir, err)
	}
	in := os.NewFile(uintptr(fd), "inotify")
	defer in.Close()
	stop := context.AfterFunc(ctx, func() { _ = in.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	w := watching{l: l, ctx: ctx, asked: dir, base: trimRoot(dir), in: in, fd: fd, recursive: recursive, fn: fn, paths: map[int]string{}}
	// inotify takes paths only. A thread with a working directory of its own
	// turns a descriptor into one.
	err = linux.OnThread(func() error {
		if err := unix.Unshare(unix.CLONE_FS); err != nil {
			return err
		}
		return w.run()
	})
	if ctx.Err() != nil {
		return fail(opWatch, dir, ctx.Err())
	}
	return fail(opWatch, dir, err)
}

// watching is one call of Watch; all of it runs on one thread.
type watching struct {
	l         *Local
	ctx       context.Context
	asked     string
	base      string // prefix of reported paths
	in        *os.File
	fd        int // of in, which is open as long as this runs
	recursive bool
	fn        func(Change) error
	paths     map[int]string // of watch descriptors, below base; "" or "/…"
	self      int            // watch descriptor of the directory itself
}

func (w *watching) run() error {
	if err := w.add("", false); err != nil {
		return err
	}
	if err := w.fn(Change{Path: w.asked, Op: OpWatching}); err != nil {
		return err
	}
	buf := make([]byte, 64<<10)
	for {
		n, err := w.in.Read(buf)
		if err != nil {
			return errno(err)
		}
		for b := buf[:n]; len(b) >= unix.SizeofInotifyEvent; {
			size := unix.SizeofInotifyEvent + int(binary.NativeEndian.Uint32(b[12:]))
			name := strings.TrimRight(string(b[unix.SizeofInotifyEvent:size]), "\x00")
			err := w.event(int(int32(binary.NativeEndian.Uint32(b))), binary.NativeEndian.Uint32(b[4:]), name)
			if err != nil {
				return err
			}
			b = b[size:]
		}
	}
}

// add watches the directory rel. With tell, what is in it is reported; that is
// a directory that was made while nobody watched it.
func (w *watching) add(rel string, tell bool) error {
	d, err := w.open(rel)
	if err != nil {
		return err
	}
	defer d.Close()
	if err := unix.Fchdir(int(d.Fd())); err != nil {
		return err
	}
	if len(w.paths) >= maxWatches {
		return dsec.Errorf(dsec.ResourceExhausted, opWatch, dsec.Quote(w.asked), "more than %d directories", maxWatches)
	}
	wd, err := unix.InotifyAddWatch(w.fd, ".", watchMask)
	if cerr := unix.Fchdir(int(w.l.root.Fd())); err == nil { // a directory somebody stands in is not seen to go
		err = cerr
	}
	if err == unix.ENOSPC {
		return dsec.Errorf(dsec.ResourceExhausted, opWatch, dsec.Quote(w.asked), "too many watched directories of this user")
	}
	if err != nil {
		return err
	}
	if len(w.paths) == 0 {
		w.self = wd
	}
	w.paths[wd] = rel
	if !w.recursive {
		return nil
	}
	return w.below(d, rel, tell)
}

// open opens a directory; below the first one links are not followed.
func (w *watching) open(rel string) (*os.File, error) {
	if rel == "" {
		return w.l.openDir(w.asked)
	}
	return w.l.open(w.base+rel, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW)
}

func (w *watching) below(d *os.File, rel string, tell bool) error {
	for {
		names, err := d.Readdirnames(512)
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return errno(err)
		}
		for _, name := range names {
			if err := w.ctx.Err(); err != nil {
				return err
			}
			if err := w.found(d, rel+"/"+name, name, tell); err != nil {
				return err
			}
		}
	}
}

func (w *watching) found(d *os.File, rel, name string, tell bool) error {
	st, err := lstatAt(d, name)
	if err != nil {
		return nil // gone already
	}
	if tell {
		if err := w.fn(Change{Path: w.base + rel, Op: OpCreate}); err != nil {
			return err
		}
	}
	if kindOf(st.Mode) != Dir {
		return nil
	}
	return w.enter(rel, tell)
}

// enter watches a directory that may be gone, replaced or closed to the user.
func (w *watching) enter(rel string, tell bool) error {
	err := w.add(rel, tell)
	for _, e := range []error{unix.ENOENT, unix.ENOTDIR, unix.ELOOP, unix.EACCES} {
		if errors.Is(err, e) {
			return nil
		}
	}
	return err
}

func (w *watching) event(wd int, mask uint32, name string) error {
	if mask&unix.IN_Q_OVERFLOW != 0 {
		return w.fn(Change{Path: w.asked, Op: OpLost})
	}
	rel, known := w.paths[wd]
	switch {
	case !known:
		return nil
	case mask&unix.IN_IGNORED != 0:
		delete(w.paths, wd)
		return nil
	case mask&unix.IN_DELETE_SELF != 0:
		if wd == w.self {
			return unix.ENOENT
		}
		return nil // its parent reports it
	case name == "":
		return nil // attributes of the directory itself
	}
	rel += "/" + name
	op := opOf(mask)
	if mask&unix.IN_ISDIR != 0 && mask&unix.IN_MOVED_FROM != 0 {
		w.forget(rel)
	}
	if err := w.fn(Change{Path: w.base + rel, Op: op}); err != nil {
		return err
	}
	if w.recursive && op == OpCreate && mask&unix.IN_ISDIR != 0 {
		return w.enter(rel, true)
	}
	return nil
}

// forget stops watching a directory that was moved away, and all below it.
func (w *watching) forget(rel string) {
	for wd, p := range w.paths {
		if p == rel || strings.HasPrefix(p, rel+"/") {
			_, _ = unix.InotifyRmWatch(w.fd, uint32(wd))
			delete(w.paths, wd)
		}
	}
}

func opOf(mask uint32) Op {
	switch {
	case mask&(unix.IN_CREATE|unix.IN_MOVED_TO) != 0:
		return OpCreate
	case mask&(unix.IN_DELETE|unix.IN_MOVED_FROM) != 0:
		return OpRemove
	case mask&unix.IN_MODIFY != 0:
		return OpWrite
	}
	return OpAttr
}

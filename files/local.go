package files

import (
	"context"
	"os"
	"strings"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/linux"
)

const (
	maxPath    = 4096    // bytes, the kernel's own limit
	maxEntries = 100_000 // of a List
	maxDepth   = 4096    // directories within each other; each holds a descriptor
	copyBuffer = 256 << 10

	maxListed     = 32 << 20 // bytes of all paths of a List
	maxListedPath = 16 << 10 // of one
)

// Local is the file service over a directory, with the credentials of the
// process. Nothing outside the directory can be reached through it: paths are
// resolved by the kernel as if the directory were "/", and every further step
// goes through descriptors. It holds one descriptor until Close.
//
// Files are opened without blocking and must be regular before they are read
// or written. A Write through a symbolic link replaces what the link names.
type Local struct {
	root    *os.File
	names   names
	noTmp   atomic.Bool // unnamed temporary files cannot be linked here
	scratch sync.Pool   // *[]byte of copyBuffer
}

var (
	_ FS      = (*Local)(nil)
	_ Watcher = (*Local)(nil)
)

// NewLocal opens the directory root.
func NewLocal(root string) (*Local, error) {
	fd, err := unix.Open(root, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fail("open root", root, err)
	}
	l := &Local{root: os.NewFile(uintptr(fd), root)}
	l.scratch.New = func() any { b := make([]byte, copyBuffer); return &b }
	return l, nil
}

// Close lets go of the root.
func (l *Local) Close() error { return l.root.Close() }

// check refuses what no kernel call should see.
func check(ctx context.Context, op, path string) error {
	if err := ctx.Err(); err != nil {
		return fail(op, path, err)
	}
	switch {
	case !strings.HasPrefix(path, "/"):
		return invalid(op, path, "not an absolute path")
	case strings.IndexByte(path, 0) >= 0:
		return invalid(op, path, "holds a zero byte")
	case len(path) >= maxPath:
		return invalid(op, path, "longer than %d bytes", maxPath-1)
	}
	return nil
}

// open opens a path inside the root.
func (l *Local) open(path string, flags int) (*os.File, error) {
	f, err := linux.OpenIn(l.root, path, flags|unix.O_NOCTTY)
	return f, errno(err)
}

// openPath is open for a handle that only names the entry.
func (l *Local) openPath(path string, follow bool) (*os.File, error) {
	flags := unix.O_PATH
	if !follow {
		flags |= unix.O_NOFOLLOW
	}
	f, err := linux.OpenIn(l.root, path, flags)
	return f, errno(err)
}

func (l *Local) openDir(path string) (*os.File, error) {
	return l.open(path, unix.O_RDONLY|unix.O_DIRECTORY)
}

// child opens an entry of a directory that is not a link; flags as open(2).
func child(dir *os.File, name string, flags int, mode uint32) (*os.File, error) {
	for {
		fd, err := unix.Openat(int(dir.Fd()), name, flags|unix.O_NOFOLLOW|unix.O_CLOEXEC|unix.O_NONBLOCK|unix.O_NOCTTY, mode)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return nil, err
		}
		return os.NewFile(uintptr(fd), name), nil
	}
}

func fstat(f *os.File) (st unix.Stat_t, err error) {
	return st, unix.Fstat(int(f.Fd()), &st)
}

func lstatAt(dir *os.File, name string) (st unix.Stat_t, err error) {
	return st, unix.Fstatat(int(dir.Fd()), name, &st, unix.AT_SYMLINK_NOFOLLOW)
}

func kindOf(mode uint32) Kind {
	switch mode & unix.S_IFMT {
	case unix.S_IFREG:
		return File
	case unix.S_IFDIR:
		return Dir
	case unix.S_IFLNK:
		return Symlink
	}
	return Other
}

// openRegular opens a file for reading; anything but a regular one is refused.
func (l *Local) openRegular(op, path string, flags int) (*os.File, unix.Stat_t, error) {
	f, err := l.open(path, flags)
	if err != nil {
		return nil, unix.Stat_t{}, fail(op, path, err)
	}
	st, err := regular(op, path, f)
	if err != nil {
		f.Close()
		return nil, st, err
	}
	return f, st, nil
}

func regular(op, path string, f *os.File) (unix.Stat_t, error) {
	st, err := fstat(f)
	switch {
	case err != nil:
		return st, fail(op, path, err)
	case kindOf(st.Mode) == Dir:
		return st, dsec.E(dsec.IsADirectory, op, dsec.Quote(path), unix.EISDIR)
	case kindOf(st.Mode) != File:
		return st, invalid(op, path, "not a regular file")
	}
	return st, nil
}

func (l *Local) buffer() (b []byte, done func()) {
	p := l.scratch.Get().(*[]byte)
	return *p, func() { l.scratch.Put(p) }
}

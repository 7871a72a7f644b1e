package snapshot

import (
	"errors"
	"io"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/linux"
)

// openDir opens a directory below root, following no link. The kernel takes
// paths of 4 KiB; a longer one is gone in several steps.
func openDir(root *os.File, name string) (*os.File, error) {
	const most = 4000
	at := root
	for {
		part := name
		if len(part) > most {
			part = part[:strings.LastIndexByte(part[:most], '/')]
		}
		name = strings.TrimPrefix(name[len(part):], "/")
		if part == "" {
			part = "."
		}
		d, err := linux.OpenBeneath(at, part, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW)
		if at != root {
			at.Close()
		}
		if err != nil || name == "" {
			return d, err
		}
		at = d
	}
}

// errRestless is of a name that means another thing each time it is looked at.
var errRestless = errors.New("changes faster than it can be read")

// openEntry opens a name in a directory without any effect on what it names:
// regular files and directories for reading, the rest only to be described.
// Between the look and the opening the name can become another thing, which
// is seen: opening a FIFO does not wait, and on the mounts this is used on no
// device can be opened.
func openEntry(dir *os.File, name string) (*os.File, *unix.Stat_t, error) {
	var st, now unix.Stat_t
	for range 8 {
		if err := unix.Fstatat(int(dir.Fd()), name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
			return nil, nil, err
		}
		flags := unix.O_PATH
		if t := st.Mode & unix.S_IFMT; t == unix.S_IFREG || t == unix.S_IFDIR {
			flags = unix.O_RDONLY | unix.O_NONBLOCK
		}
		fd, err := unix.Openat(int(dir.Fd()), name, flags|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		switch {
		case errors.Is(err, unix.EINTR), errors.Is(err, unix.ELOOP), errors.Is(err, unix.ENXIO), errors.Is(err, unix.EACCES):
			continue // it was no link, socket or device a moment ago
		case err != nil:
			return nil, nil, err
		}
		if err := unix.Fstat(fd, &now); err != nil {
			_ = unix.Close(fd)
			return nil, nil, err
		}
		if now.Mode&unix.S_IFMT == st.Mode&unix.S_IFMT {
			return os.NewFile(uintptr(fd), name), &now, nil
		}
		_ = unix.Close(fd)
	}
	return nil, nil, errRestless
}

func stat(f *os.File) (*unix.Stat_t, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return nil, &os.PathError{Op: "stat", Path: f.Name(), Err: err}
	}
	return &st, nil
}

// contents reads a regular file as it was when it was opened: what is behind
// the size it had is not seen, and where it has become shorter it is zero.
type contents struct {
	f     *os.File
	size  int64
	short int64               // where it ended when it was found shorter, plus one; 0: it was not
	spend func(n int64) error // asked before n bytes are read
	seen  func(b []byte, off int64) error
}

// end is where the file ended.
func (c *contents) end() int64 {
	if c.short == 0 {
		return c.size
	}
	return c.short - 1
}

func (c *contents) ReadAt(b []byte, off int64) (int, error) {
	want := b[:max(0, min(int64(len(b)), c.size-off))]
	if err := c.spend(int64(len(want))); err != nil {
		return 0, err
	}
	n, err := c.f.ReadAt(want, off)
	if err == io.EOF && n < len(want) {
		if end := off + int64(n); c.short == 0 || end < c.short-1 {
			c.short = end + 1
		}
		clear(want[n:])
		n, err = len(want), nil
	}
	if err == nil && len(want) < len(b) {
		err = io.EOF
	}
	if c.seen != nil && n > 0 {
		if err := c.seen(want[:n], off); err != nil {
			return 0, err
		}
	}
	return n, err
}

// NextData finds what is no hole; a file system that cannot tell has none.
func (c *contents) NextData(off int64) (start, end int64, err error) {
	if off >= c.size {
		return off, off, nil
	}
	if err := c.spend(0); err != nil { // a file of many pieces is many of these
		return 0, 0, err
	}
	start, err = unix.Seek(int(c.f.Fd()), off, unix.SEEK_DATA)
	if errors.Is(err, unix.ENXIO) {
		return c.size, c.size, nil
	}
	if err != nil {
		return off, c.size, nil
	}
	if end, err = unix.Seek(int(c.f.Fd()), start, unix.SEEK_HOLE); err != nil {
		end = c.size
	}
	return min(start, c.size), min(end, c.size), nil
}

// head reads the beginning of a file, up to maxLooked bytes of it: whole as it
// is, data without its holes, with a zero byte for each.
func (c *contents) head() (data, whole []byte, err error) {
	size := min(c.size, maxLooked)
	end := int64(0) // of what is in data
	for off := int64(0); off < size; {
		start, stop, err := c.NextData(off)
		if err != nil {
			return nil, nil, err
		}
		if start = max(start, off); start >= min(stop, size) {
			break
		}
		if whole == nil {
			whole = make([]byte, size)
		}
		off = min(stop, size)
		if _, err := c.ReadAt(whole[start:off], start); err != nil && err != io.EOF {
			return nil, nil, err
		}
		if start > end {
			data = append(data, 0)
		}
		data, end = append(data, whole[start:off]...), off
	}
	return data, whole, nil
}

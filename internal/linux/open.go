package linux

import (
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// OpenIn opens a path as if root were the root of the file system: absolute
// links and ".." stay inside, magic links of proc are refused. Flags are
// unix.O_*, without O_CREAT; O_CLOEXEC and O_NONBLOCK (so that a FIFO does not hang the caller)
// are added.
func OpenIn(root *os.File, path string, flags int) (*os.File, error) {
	how := unix.OpenHow{
		Flags:   uint64(flags) | unix.O_CLOEXEC | unix.O_NONBLOCK,
		Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS,
	}
	if flags&unix.O_PATH != 0 {
		how.Flags &^= unix.O_NONBLOCK // not valid together
	}
	return openat2(root, path, &how)
}

// longPath is of one call less than the kernel takes, which somebody inside can make
// longer ones than.
const longPath = 4000

// Steps cuts a path into parts that the kernel takes, one below the other.
func Steps(path string) (parts []string) {
	for len(path) > longPath {
		end := strings.LastIndexByte(path[:longPath], '/')
		if end <= 0 { // no name is so long
			break
		}
		parts, path = append(parts, path[:end]), path[end+1:]
	}
	return append(parts, path)
}

// OpenBeneath opens a path of any length that may not leave dir nor cross a symbolic
// link.
func OpenBeneath(dir *os.File, path string, flags int) (*os.File, error) {
	parts := Steps(path)
	for _, part := range parts[:len(parts)-1] {
		next, err := openBeneath(dir, part, unix.O_PATH|unix.O_DIRECTORY)
		if err != nil {
			return nil, err
		}
		defer next.Close() // one for each longPath bytes
		dir = next
	}
	return openBeneath(dir, parts[len(parts)-1], flags)
}

func openBeneath(dir *os.File, path string, flags int) (*os.File, error) {
	how := unix.OpenHow{
		Flags:   uint64(flags) | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS,
	}
	return openat2(dir, path, &how)
}

func openat2(dir *os.File, path string, how *unix.OpenHow) (*os.File, error) {
	var fd int
	for tries := 0; ; tries++ {
		err := retry(func() (err error) {
			fd, err = unix.Openat2(int(dir.Fd()), path, how)
			return err
		})
		// A rename or mount during the walk gives EAGAIN; a few tries are what the manual advises.
		if err == unix.EAGAIN && tries < 8 {
			continue
		}
		return file(fd, err, "open", path)
	}
}

// OpenOnMount is OpenIn that stays on the mount of root: what is mounted below
// it, by whoever, is not entered and cannot hang the caller.
func OpenOnMount(root *os.File, path string, flags int) (*os.File, error) {
	how := unix.OpenHow{
		Flags:   uint64(flags) | unix.O_CLOEXEC | unix.O_NONBLOCK,
		Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS | unix.RESOLVE_NO_XDEV,
	}
	return openat2(root, path, &how)
}

package container

import (
	"os"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/linux"
)

// devName is what the hold knows the shared /dev by.
const devName = "shared/dev"

var devNodes = []struct {
	name         string
	major, minor uint32
}{{"null", 1, 3}, {"zero", 1, 5}, {"full", 1, 7}, {"random", 1, 8}, {"urandom", 1, 9}, {"tty", 5, 0}}

var devLinks = []struct{ name, target string }{{"fd", "/proc/self/fd"}, {"stdin", "/proc/self/fd/0"},
	{"stdout", "/proc/self/fd/1"}, {"stderr", "/proc/self/fd/2"}, {"ptmx", "pts/ptmx"}}

var devDirs = []string{"pts", "shm", "mqueue"}

// makeDev makes the one /dev that every sandbox has a read-only clone of: its
// nodes are the machine's own, so they work, and nobody inside can add others.
func makeDev() (m *os.File, err error) {
	m, err = linux.NewFS("tmpfs").String("mode", "0755").String("size", "64k").
		Mount(unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NOEXEC | unix.MOUNT_ATTR_NOATIME)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			m.Close()
		}
	}()
	fd := int(m.Fd())
	for _, n := range devNodes {
		if err := unix.Mknodat(fd, n.name, unix.S_IFCHR|0o666, int(unix.Mkdev(n.major, n.minor))); err != nil {
			return nil, &os.PathError{Op: "make node", Path: n.name, Err: err}
		}
		if err := unix.Fchmodat(fd, n.name, 0o666, 0); err != nil { // whatever our umask is
			return nil, &os.PathError{Op: "set mode of", Path: n.name, Err: err}
		}
	}
	for _, l := range devLinks {
		if err := unix.Symlinkat(l.target, fd, l.name); err != nil {
			return nil, &os.PathError{Op: "make link", Path: l.name, Err: err}
		}
	}
	for _, d := range devDirs {
		if err := unix.Mkdirat(fd, d, 0o755); err != nil {
			return nil, &os.PathError{Op: "make directory", Path: d, Err: err}
		}
	}
	return m, linux.SetMountAttr(m, unix.MOUNT_ATTR_RDONLY)
}

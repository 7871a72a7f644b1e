package hold

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/linux"
)

// devNodes are the devices of a sandbox, with the numbers of the machine's.
var devNodes = []struct {
	name         string
	major, minor uint32
}{{"null", 1, 3}, {"zero", 1, 5}, {"full", 1, 7}, {"random", 1, 8}, {"urandom", 1, 9}, {"tty", 5, 0}}

var devLinks = []struct{ name, target string }{{"fd", "/proc/self/fd"}, {"stdin", "/proc/self/fd/0"},
	{"stdout", "/proc/self/fd/1"}, {"stderr", "/proc/self/fd/2"}, {"ptmx", "pts/ptmx"}}

var devDirs = []struct {
	name string
	mode uint32
}{{"pts", 0o755}, {"shm", 0o1777}, {"mqueue", 0o755}}

// makeDev makes the /dev of one sandbox and its shm, of that many bytes, in one
// file system. Nobody shares an inode with another: locks and watches on
// /dev/null would reach across. The nodes work because the file system belongs
// to the machine, where nobody inside can add any.
func makeDev(uid, gid uint32, shm int64) (m *os.File, err error) {
	m, err = linux.NewFS("tmpfs").String("mode", "0755").String("size", fmt.Sprint(shm)).
		String("uid", fmt.Sprint(uid)).String("gid", fmt.Sprint(gid)).Mount(unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NOEXEC)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			_ = m.Close()
		}
	}()
	fd := fdOf(m)
	own := func(name string) error {
		return unix.Fchownat(fd, name, int(uid), int(gid), unix.AT_SYMLINK_NOFOLLOW)
	}
	for _, n := range devNodes {
		err := unix.Mknodat(fd, n.name, unix.S_IFCHR|0o666, int(unix.Mkdev(n.major, n.minor)))
		if err == nil {
			err = own(n.name)
		}
		if err == nil {
			err = unix.Fchmodat(fd, n.name, 0o666, 0) // whatever our umask is
		}
		if err != nil {
			return nil, &os.PathError{Op: "make node", Path: n.name, Err: err}
		}
	}
	for _, l := range devLinks {
		if err := unix.Symlinkat(l.target, fd, l.name); err != nil {
			return nil, &os.PathError{Op: "make link", Path: l.name, Err: err}
		}
	}
	for _, d := range devDirs {
		err := unix.Mkdirat(fd, d.name, d.mode)
		if err == nil {
			err = own(d.name)
		}
		if err == nil {
			err = unix.Fchmodat(fd, d.name, d.mode, 0)
		}
		if err != nil {
			return nil, &os.PathError{Op: "make directory", Path: d.name, Err: err}
		}
	}
	return m, nil
}

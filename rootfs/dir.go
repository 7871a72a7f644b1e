package rootfs

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
)

// Upper and work are the two directories below Root.Dir.
const (
	Upper    = "upper"
	workName = "work"
)

// PrepareDir makes dir ready to be stacked: an upper that belongs to root as
// the sandbox sees it, made if missing and else kept, and an empty work. A
// volatile overlay leaves a marker in work that forbids its reuse, so work
// never survives.
func PrepareDir(dir *os.File, uid, gid int) error {
	fd := int(dir.Fd())
	switch err := unix.Mkdirat(fd, Upper, 0o755); {
	case err == nil:
		if err := unix.Fchownat(fd, Upper, uid, gid, unix.AT_SYMLINK_NOFOLLOW); err != nil {
			return dsec.E(dsec.Internal, "own upper of", dir.Name(), err)
		}
	case !errors.Is(err, unix.EEXIST):
		return diskError("make upper of", dir.Name(), err)
	default:
		if err := clearWork(dir); err != nil {
			return dsec.E(dsec.Internal, "clear work of", dir.Name(), err)
		}
	}
	if err := unix.Mkdirat(fd, workName, 0o700); err != nil {
		return diskError("make work of", dir.Name(), err)
	}
	return nil
}

func clearWork(dir *os.File) error {
	root, err := os.OpenRoot(fmt.Sprintf("/proc/self/fd/%d", dir.Fd()))
	if err != nil {
		return err
	}
	defer root.Close()
	return root.RemoveAll(workName)
}

func diskError(op, object string, err error) error {
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return dsec.E(dsec.NoSpace, op, object, err)
	}
	return dsec.E(dsec.Internal, op, object, err)
}

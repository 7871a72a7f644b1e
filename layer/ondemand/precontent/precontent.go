// Package precontent has the kernel ask before it reads the data of a layer
// that are not here yet: pre-content events of fanotify (Linux 6.14; ext4, xfs,
// btrfs). The data file is an ordinary sparse file and is mounted as one that
// is whole. While it is marked, who reads it, or a file of an EROFS on it,
// waits in the kernel until Serve has answered.
//
// # What is kept where
//
// NewGroup makes the group of a machine, Mark puts a data file under it, and
// Unmark takes it out when all its data are here: from then on nothing stands
// in the path. A mark counts for files that are opened after it, and for those
// only: first Mark, then mount; but the descriptor that the data are written
// through is opened before.
//
// When the last descriptor of the group is closed the kernel lets everybody
// read, and those read holes, which stay in the page cache as zeros. Nothing
// can undo that, so the group has to be held by processes that do not end:
// hold, the agent and the one that serves. None of them may read what is marked.
//
// The journal (NewJournal) is kept beside the group. The kernel gives each
// event once. With the journal, who serves after a process that was killed
// answers what that one had taken: the reader waited, and never learns of it.
//
// # What may not be done
//
// A marked file must not be mapped by anything but a file system: the kernel
// asks once for a whole mapping, at mmap, and not for its pages. So a marked
// file is none that a virtual machine is given.
package precontent

import (
	"cmp"
	"fmt"
	"os"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/fault"
	"github.com/opendsec/dsec/layer/ondemand/journal"
)

// NewGroup makes a group of marks. It needs CAP_SYS_ADMIN in the first user
// namespace.
func NewGroup() (*os.File, error) {
	const op = "make fanotify group"
	fd, err := unix.FanotifyInit(unix.FAN_CLASS_PRE_CONTENT|unix.FAN_CLOEXEC|unix.FAN_NONBLOCK|unix.FAN_UNLIMITED_QUEUE|unix.FAN_UNLIMITED_MARKS,
		unix.O_RDONLY|unix.O_LARGEFILE|unix.O_CLOEXEC)
	switch err {
	case nil:
		return os.NewFile(uintptr(fd), "fanotify"), nil
	case unix.ENOSYS, unix.EINVAL:
		return nil, dsec.E(dsec.Unsupported, op, "", fmt.Errorf("the kernel has no fanotify with permission events: %w", err))
	case unix.EPERM:
		return nil, dsec.E(dsec.PermissionDenied, op, "", fmt.Errorf("it takes CAP_SYS_ADMIN in the first user namespace: %w", err))
	case unix.EMFILE:
		return nil, dsec.E(dsec.ResourceExhausted, op, "", fmt.Errorf("too many groups (fs.fanotify.max_user_groups) or files: %w", err))
	}
	return nil, dsec.E(dsec.Internal, op, "", err)
}

// Mark has the kernel ask before it reads the file through anything that is
// opened from now on. A file that is marked stays so.
func Mark(group, data *os.File) error {
	const op = "mark data file"
	err := mark(group, data, unix.FAN_MARK_ADD)
	switch err {
	case nil:
		return nil
	case unix.EINVAL:
		return dsec.E(dsec.Unsupported, op, data.Name(), fmt.Errorf("the kernel has no pre-content events (Linux 6.14): %w", err))
	case unix.EOPNOTSUPP:
		return dsec.E(dsec.Unsupported, op, data.Name(), fmt.Errorf("its file system has no pre-content events: %w", err))
	}
	return dsec.E(fault.Class(err, dsec.Internal), op, data.Name(), err)
}

// Unmark lets everybody read the file. Reads that wait are still to be
// answered. A file that is not marked is no error.
func Unmark(group, data *os.File) error {
	if err := mark(group, data, unix.FAN_MARK_REMOVE); err != nil && err != unix.ENOENT {
		return dsec.E(dsec.Internal, "unmark data file", data.Name(), err)
	}
	return nil
}

func mark(group, data *os.File, what uint) error {
	// Not by Fd, which would have all who hold the group wait in its reads.
	raw, err := group.SyscallConn()
	if err != nil {
		return err
	}
	var marked error
	err = raw.Control(func(fd uintptr) {
		for marked = unix.EINTR; marked == unix.EINTR; {
			// The file itself: a path could have come to mean another one.
			marked = unix.FanotifyMark(int(fd), what, unix.FAN_PRE_ACCESS, int(data.Fd()), "")
		}
	})
	return cmp.Or(err, marked)
}

// NewJournal makes the memory of the events that are taken and not answered.
func NewJournal() (*os.File, error) { return journal.New(shape) }

// ID names a data file in events.
func ID(data *os.File) (dev, ino uint64, err error) {
	st, err := data.Stat()
	if err != nil {
		return 0, 0, dsec.E(dsec.Internal, "look at data file", data.Name(), err)
	}
	s := st.Sys().(*syscall.Stat_t)
	return s.Dev, s.Ino, nil
}

package agent

import (
	"os"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/accounts"
	"github.com/opendsec/dsec/process"
)

// stdio is what a command's three descriptors are connected to; theirs are
// closed after the start.
type stdio struct {
	theirs []*os.File
	in     *os.File
	out    [2]*os.File
}

func closeAll(files []*os.File) {
	for _, f := range files {
		if f != nil {
			_ = f.Close()
		}
	}
}

// makePipes are the user's, so that a command can open /dev/stdout again.
func makePipes(stdin bool, who accounts.Identity) (o stdio, err error) {
	defer func() {
		if err != nil {
			closeAll(append(o.theirs, o.in, o.out[0], o.out[1]))
			o = stdio{}
		}
	}()
	if stdin {
		r, w, err := pipe()
		if err != nil {
			return o, err
		}
		o.in, o.theirs = ours(w), append(o.theirs, r)
	} else {
		null, err := os.OpenFile(os.DevNull, os.O_RDONLY, 0)
		if err != nil {
			return o, err
		}
		o.theirs = append(o.theirs, null)
	}
	for i := range o.out {
		r, w, err := pipe()
		if err != nil {
			return o, err
		}
		o.out[i], o.theirs = ours(r), append(o.theirs, w)
	}
	for i, f := range o.theirs {
		if i == 0 && !stdin {
			continue // the null device
		}
		if err := f.Chown(int(who.UID), int(who.GID)); err != nil {
			return o, err
		}
	}
	return o, nil
}

// pipe makes one whose ends block, as programs expect.
func pipe() (r, w *os.File, err error) {
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil {
		return nil, nil, os.NewSyscallError("pipe2", err)
	}
	return os.NewFile(uintptr(p[0]), "pipe"), os.NewFile(uintptr(p[1]), "pipe"), nil
}

// ours makes a file that the runtime waits for of one end.
func ours(f *os.File) *os.File {
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 3)
	_ = f.Close()
	if err != nil {
		fd = -1 // the first use errs
	}
	_ = unix.SetNonblock(fd, true)
	return os.NewFile(uintptr(fd), f.Name())
}

// makeTerminal opens one of the sandbox's, on a thread of it.
func makeTerminal(size process.Size, who accounts.Identity) (o stdio, err error) {
	fd, err := unix.Open("/dev/pts/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return o, os.NewSyscallError("open terminal", err)
	}
	master := os.NewFile(uintptr(fd), "terminal")
	slave, err := slaveOf(fd)
	if err == nil {
		err = slave.Chown(int(who.UID), -1)
	}
	if err == nil {
		err = setSize(master, size)
	}
	if err != nil {
		closeAll([]*os.File{master, slave})
		return o, err
	}
	o.in, o.out[0] = master, master
	o.theirs = []*os.File{slave, slave, slave}
	return o, nil
}

func slaveOf(master int) (*os.File, error) {
	if err := unix.IoctlSetPointerInt(master, unix.TIOCSPTLCK, 0); err != nil {
		return nil, os.NewSyscallError("unlock terminal", err)
	}
	fd, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(master), unix.TIOCGPTPEER, unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC)
	if errno != 0 {
		return nil, os.NewSyscallError("open terminal", errno)
	}
	return os.NewFile(fd, "terminal"), nil
}

func setSize(master *os.File, size process.Size) error {
	rc, err := master.SyscallConn()
	if err != nil {
		return err
	}
	var serr error
	if err := rc.Control(func(fd uintptr) {
		serr = unix.IoctlSetWinsize(int(fd), unix.TIOCSWINSZ, &unix.Winsize{Row: size.Rows, Col: size.Cols})
	}); err != nil {
		return err
	}
	return os.NewSyscallError("resize terminal", serr)
}

func setOOMScore(pid, adj int) {
	_ = os.WriteFile("/proc/"+strconv.Itoa(pid)+"/oom_score_adj", []byte(strconv.Itoa(adj)), 0) // it may have ended
}

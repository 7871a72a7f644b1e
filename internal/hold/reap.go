package hold

import (
	"encoding/binary"
	"errors"
	"os"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ending is how a process ended.
type ending struct {
	code   int // exit code, 0 if a signal ended it
	signal int
	cpu    time.Duration // it and what it waited for
}

const (
	cldExited = 1
	wclone    = unix.WEXITED | 0x40000000 // __WALL
)

// childPidfd opens a pidfd of a child of ours that nobody has reaped, and so
// cannot be another process; ECHILD says it is not ours.
func childPidfd(pid int) (*os.File, error) {
	fd, err := unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK)
	if err != nil {
		return nil, os.NewSyscallError("pidfd_open", err)
	}
	f := os.NewFile(uintptr(fd), "pidfd")
	if err := ours(fd); err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

func ours(fd int) error {
	var si unix.Siginfo
	return os.NewSyscallError("waitid", noEINTR(func() error {
		return unix.Waitid(unix.P_PIDFD, fd, &si, wclone|unix.WNOHANG|unix.WNOWAIT, nil)
	}))
}

// awaitEnd waits for the process behind a pidfd and reaps it.
func awaitEnd(pidfd *os.File) (ending, error) {
	rc, err := pidfd.SyscallConn()
	if err != nil {
		return ending{}, err
	}
	var e ending
	var werr error
	err = rc.Read(func(fd uintptr) bool {
		var done bool
		e, done, werr = reap(unix.P_PIDFD, int(fd), unix.WNOHANG)
		return done || werr != nil
	})
	if err != nil {
		return ending{}, err
	}
	return e, werr
}

// vigil is the wait for the end of one process, or for clients.
type vigil struct {
	mu sync.Mutex
	on bool // a goroutine waits
}

// attend begins to wait for a process and calls end with how it ended. Quiescing
// stops the wait, if the process has not ended by then; attend begins it again.
func (s *server) attend(v *vigil, pidfd *os.File, end func(ending, error)) {
	v.mu.Lock()
	defer v.mu.Unlock()
	_ = pidfd.SetReadDeadline(never)
	if v.on {
		return
	}
	v.on = true
	s.watchers.enter()
	go func() {
		defer s.watchers.leave()
		for {
			e, err := awaitEnd(pidfd)
			if !errors.Is(err, os.ErrDeadlineExceeded) {
				end(e, err)
				return
			}
			v.mu.Lock()
			quiesced := s.quiesced.Load()
			v.on = !quiesced
			v.mu.Unlock()
			if quiesced {
				return
			}
		}
	}()
}

// reapPID waits for a child that is about to end and reaps it.
func reapPID(pid int) ending {
	e, _, _ := reap(unix.P_PID, pid, 0)
	return e
}

func reap(kind, id, flags int) (e ending, done bool, err error) {
	var si unix.Siginfo
	var ru unix.Rusage
	err = noEINTR(func() error { return unix.Waitid(kind, id, &si, wclone|flags, &ru) })
	if err == unix.EAGAIN { // a non-blocking pidfd says it this way
		return e, false, nil
	}
	if err != nil {
		return e, false, os.NewSyscallError("waitid", err)
	}
	b := (*[32]byte)(unsafe.Pointer(&si))
	if binary.LittleEndian.Uint32(b[16:]) == 0 { // si_pid: nothing yet
		return e, false, nil
	}
	status := int(int32(binary.LittleEndian.Uint32(b[24:])))
	if si.Code == cldExited {
		e.code = status
	} else {
		e.signal = status
	}
	e.cpu = time.Duration(ru.Utime.Nano() + ru.Stime.Nano())
	return e, true, nil
}

func signalPidfd(pidfd *os.File, sig syscall.Signal) error {
	rc, err := pidfd.SyscallConn()
	if err != nil {
		return err
	}
	var serr error
	if err := rc.Control(func(fd uintptr) { serr = unix.PidfdSendSignal(int(fd), sig, nil, 0) }); err != nil {
		return err
	}
	return serr
}

func noEINTR(f func() error) error {
	for {
		if err := f(); err != unix.EINTR {
			return err
		}
	}
}

// openPlain opens a file without telling the runtime's poller of it, which files
// of cgroup file systems could be waited for with.
func openPlain(path string, flags int) (*os.File, error) {
	var fd int
	err := noEINTR(func() (err error) {
		fd, err = unix.Open(path, flags|unix.O_CLOEXEC, 0)
		return err
	})
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	return os.NewFile(uintptr(fd), path), nil
}

// readPlain reads a small file of the kernel's.
func readPlain(path string) ([]byte, error) {
	f, err := openPlain(path, unix.O_RDONLY)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	b := make([]byte, 4096)
	n, err := f.Read(b)
	return b[:n], err
}

func writePlain(path, text string) error {
	f, err := openPlain(path, unix.O_WRONLY)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	_, err = f.WriteString(text)
	return err
}

package hold

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
)

// launch has a forker start the command and waits until it runs its own
// program. It returns the terminal's master, if there is one.
func (e *execution) launch(tasks, stdio []*os.File) (pty *os.File, err error) {
	l := &launch{sb: e.sb, group: e.group, tasks: tasks, image: e.spec.image, last: stdio}
	filter := e.sb.mayNotice(l.image)
	main, pty, err := l.run()
	if err != nil {
		closeAll([]*os.File{l.listener})
		return nil, e.explain(err)
	}
	e.pid, e.pidfd = main.pid, main.pidfd
	if filter != nil {
		e.sb.listen(e.spec.Spec.ID, l.listener, filter)
	} else {
		closeAll([]*os.File{l.listener})
	}
	if e.spec.Spec.PTY == nil {
		return nil, nil
	}
	if pty == nil {
		err = errors.New("no terminal came")
	} else if err = realPTY(pty); err == nil {
		pty, err = pollableFile(pty)
	}
	if err != nil {
		_ = killCgroup(e.group)
		_, _ = awaitEnd(e.pidfd)
		_ = e.pidfd.Close()
		return nil, dsec.E(dsec.Invalid, "open terminal of exec", e.spec.Spec.ID, err)
	}
	return pty, nil
}

// realPTY refuses what is not a master of a devpts: /dev/ptmx inside could be
// anything.
func realPTY(f *os.File) error {
	var st unix.Stat_t
	if err := unix.Fstat(fdOf(f), &st); err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFCHR || unix.Major(st.Rdev) != 5 || unix.Minor(st.Rdev) != 2 {
		return errors.New("/dev/ptmx is not a terminal multiplexer")
	}
	if _, err := unix.IoctlGetInt(fdOf(f), unix.TIOCGPTN); err != nil {
		return fmt.Errorf("/dev/ptmx: %w", err)
	}
	return nil
}

// explain turns where a start broke off into an error that names the culprit.
func (e *execution) explain(err error) error {
	l, ok := errors.AsType[*launchError](err)
	if !ok {
		return err
	}
	program, cwd := dsec.Quote(string(e.spec.Spec.Argv[0])), dsec.Quote(string(e.spec.Cwd))
	class := errnoClass(l.a.errno())
	switch l.a.Step {
	case stepExec:
		return dsec.E(class, "exec", program, l.a.errno())
	case stepCwd:
		return dsec.E(class, "change to directory", cwd, l.a.errno())
	case stepFork, stepSetns, stepClone, stepTasks:
		if e.sb.dying() {
			return dsec.E(dsec.SandboxGone, "exec", e.sb.name(), l.a.errno())
		}
		if l.a.errno() == unix.EAGAIN {
			return dsec.Errorf(dsec.ResourceExhausted, "exec", e.sb.name(), "the process limit is reached: %w", l.a.errno())
		}
	}
	return dsec.Errorf(class, "exec", e.spec.Spec.ID, "%s: %w", l.a.stepName(), l.a.errno())
}

func errnoClass(err error) dsec.Class {
	switch err {
	case unix.ENOENT:
		return dsec.FileNotFound
	case unix.ENOTDIR:
		return dsec.NotADirectory
	case unix.EACCES, unix.EPERM:
		return dsec.PermissionDenied
	case unix.E2BIG, unix.ENOEXEC, unix.ELOOP, unix.ENAMETOOLONG, unix.EISDIR, unix.ELIBBAD, unix.EINVAL:
		return dsec.Invalid
	case unix.EAGAIN, unix.ENOMEM, unix.ENFILE, unix.EMFILE:
		return dsec.ResourceExhausted
	}
	return dsec.Internal
}

// child is a process whose parent we are.
type child struct {
	pid   int
	pidfd *os.File
}

// launchError says where the C program broke off.
type launchError struct{ a answer }

func (l *launchError) Error() string { return l.a.stepName() + ": " + l.a.errno().Error() }

func (l *launchError) Unwrap() error { return l.a.errno() }

// launch is one trip of a new process through the C program.
type launch struct {
	sb    *sandbox
	group string
	tasks []*os.File
	image []byte
	last  []*os.File // stdio, and the program of a helper

	listener *os.File // of the command's filter, if it has one
}

func (l *launch) run() (*child, *os.File, error) {
	group, err := openPlain(l.group, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return nil, nil, err
	}
	defer func() { _ = group.Close() }()
	report, theirs, err := packetPair()
	if err != nil {
		return nil, nil, err
	}
	defer func() { _ = report.Close() }()
	files := append([]*os.File{l.sb.pidfd, theirs, group}, l.tasks...)
	files = append(files, l.last...)
	err = l.sb.s.anyForker().exec(l.image, len(l.tasks), files)
	_ = theirs.Close()
	if err != nil {
		return nil, nil, err
	}
	return l.follow(report)
}

// follow reads what the two processes on the way report. The last word has the
// one between: it speaks when the other runs its own program, or has failed.
func (l *launch) follow(report *packets) (c *child, pty *os.File, err error) {
	report.setReadDeadline(time.Now().Add(nativeWait))
	for {
		a, files, rerr := report.answer()
		switch {
		case rerr != nil: // killed on the way, or stuck
			if err == nil && errors.Is(rerr, net.ErrClosed) {
				rerr = &launchError{answer{Step: stepSetns, Errno: int32(unix.ESRCH)}}
			} else if err == nil {
				rerr = dsec.Errorf(dsec.Timeout, "exec", l.sb.name(), "it did not start within %v: stopped by something inside? %w", nativeWait, rerr)
			}
			_ = killCgroup(l.group)
			reapStray(l.group)
			closeAll([]*os.File{pty})
			return nil, nil, cmp.Or(err, rerr)
		case !a.ok():
			err = &launchError{a}
			if a.Step > stepImage { // said by the command-to-be: the one between is still to speak
				continue
			}
			if a.Self != 0 {
				reapPID(int(a.Self))
			}
			return nil, nil, err
		case a.PID == pidListener && len(files) > 0 && l.listener == nil:
			l.listener, files = files[0], files[1:]
		case a.PID == pidListener:
		case len(files) > 0 && pty == nil:
			pty, files = files[0], files[1:]
		case a.PID != 0:
			return l.arrived(a, pty, err)
		}
		closeAll(files)
	}
}

// arrived has the command's number, whether it runs or has failed.
func (l *launch) arrived(a answer, pty *os.File, err error) (*child, *os.File, error) {
	if err != nil {
		reapPID(int(a.PID))
		reapPID(int(a.Self))
		closeAll([]*os.File{pty})
		return nil, nil, err
	}
	pidfd, err := childPidfd(int(a.PID))
	reapPID(int(a.Self))
	if err != nil {
		_ = killCgroup(l.group)
		closeAll([]*os.File{pty})
		return nil, nil, err
	}
	return &child{pid: int(a.PID), pidfd: pidfd}, pty, nil
}

package inside

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// runMain starts a sandbox and stays its parent. Once it runs, the output of this
// process is PID 1's.
func runMain(r Run) error {
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("prctl: %w", err)
	}
	self, err := os.Open("/proc/self/exe")
	if err != nil {
		return err
	}
	cmd := exec.Command(r.Path)
	cmd.Args = append(append([]string{"runsc"}, r.Flags...), "run", "--detach", "--bundle", r.Bundle, "--exec-fd", "3", r.Name)
	cmd.ExtraFiles = []*os.File{self}
	cmd.Env = []string{"PATH=/bin"}
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("runsc run: %w", err)
	}
	_ = self.Close()
	for _, fd := range []int{0, 1, 2} {
		_ = unix.Close(fd)
	}
	// The sentry, and its gofer: when one is gone the other is of no use.
	var ws unix.WaitStatus
	for {
		if _, err := unix.Wait4(-1, &ws, 0, nil); !errors.Is(err, unix.EINTR) {
			os.Exit(3) // as something that nobody asked for
		}
	}
}

// execMain is one command.
func execMain(c Command, argv []string) error {
	signals := make(chan os.Signal, 64)
	signal.Notify(signals)
	signal.Reset(syscall.SIGCHLD, syscall.SIGURG)
	g := guarded{Terminal: c.Terminal, Processes: c.Processes}
	args, err := guardArgv(g, argv)
	if err != nil {
		return err
	}
	p := c.Who.process(args)
	p.Terminal, p.Cwd, p.Env, p.NoNewPrivileges = c.Terminal, c.Cwd, c.Env, c.NoNewPrivs
	l, err := c.spawn(p, [3]*os.File{os.Stdin, os.Stdout, os.Stderr})
	if err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", argv[0], err)
		if errors.Is(err, unix.ENOENT) {
			os.Exit(127)
		}
		os.Exit(126)
	}
	// What the command has, this process must not: a pipe ends with its last end.
	for _, fd := range []int{0, 1, 2} {
		_ = unix.Close(fd)
	}
	go func() {
		for s := range signals {
			if n, ok := s.(syscall.Signal); ok && n != syscall.SIGCHLD && n != syscall.SIGURG {
				_, _ = l.c.Write([]byte{byte(n)})
			}
		}
	}()
	word, n, err := l.read()
	switch {
	case err != nil: // whoever guarded it was killed
		dieOf(syscall.SIGKILL)
	case word == wordKilled:
		dieOf(syscall.Signal(n))
	}
	os.Exit(n)
	return nil
}

// dieOf ends this process by a signal, whatever Go's runtime wants to do with it.
func dieOf(sig syscall.Signal) {
	_ = unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{})
	runtime.LockOSThread()
	var dfl [4]uint64 // SIG_DFL, no flags
	_, _, _ = unix.RawSyscall6(unix.SYS_RT_SIGACTION, uintptr(sig), uintptr(unsafe.Pointer(&dfl)), 0, 8, 0, 0)
	var none uint64
	const sigSetmask = 2
	_, _, _ = unix.RawSyscall6(unix.SYS_RT_SIGPROCMASK, sigSetmask, uintptr(unsafe.Pointer(&none)), 0, 8, 0, 0)
	_ = unix.Tgkill(unix.Getpid(), unix.Gettid(), sig)
	os.Exit(128 + int(sig)) // one that ends nobody
}

func dialMain(s Service) error {
	c, err := net.Dial("unix", s.Socket)
	if err != nil {
		return err
	}
	f, err := c.(*net.UnixConn).File()
	if err != nil {
		return err
	}
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	argv := []string{"files", roleServe}
	if s.Port > 0 {
		argv = []string{"join", roleJoin, strconv.Itoa(int(s.Port))}
	}
	_, err = s.spawn(s.Who.process(argv), [3]*os.File{f, null, null})
	return err
}

// saveMain ends what runs inside and writes down what the root's upper layer holds.
func saveMain(s Save) error {
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	root := Who{Bounding: 1 << unix.CAP_KILL, Permitted: 1 << unix.CAP_KILL}
	l, err := s.spawn(root.process([]string{"end", roleEnd}), [3]*os.File{null, null, null})
	if err != nil {
		return err
	}
	if word, n, err := l.read(); err != nil || word != wordExited || n != 0 {
		return fmt.Errorf("end all processes: %c %d: %w", word, n, err)
	}
	tmp := s.File + ".new"
	cmd := exec.Command(s.Path)
	cmd.Args = append(append([]string{"runsc"}, s.Flags...), "tar", "rootfs-upper", "--file", tmp, s.Name)
	cmd.Env = []string{"PATH=/bin"}
	if said, err := cmd.CombinedOutput(); err != nil {
		_ = os.Remove(tmp)
		return fmt.Errorf("runsc tar: %w: %s", err, strings.TrimSpace(string(said)))
	}
	return os.Rename(tmp, s.File)
}

// stillFile is there while the sandbox is paused, or is about to be.
const stillFile = StateDir + "/still"

// pause has the sentry stop all tasks.
func (r Runsc) pause() error {
	if err := os.WriteFile(stillFile, nil, 0o600); err != nil {
		return err
	}
	return r.become("pause", "paused")
}

// resume has them go on.
func (r Runsc) resume() error {
	if err := r.become("resume", "running"); err != nil {
		return err
	}
	if err := os.Remove(stillFile); !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// become has the sandbox be in a state, in which it may be already.
func (r Runsc) become(verb, state string) error {
	cmd := exec.Command(r.Path)
	cmd.Args = append(append([]string{"runsc"}, r.Flags...), verb, r.Name)
	cmd.Env = []string{"PATH=/bin"}
	said, err := cmd.CombinedOutput()
	if text := strings.TrimSpace(string(said)); err != nil && !strings.Contains(text, "in state "+state) {
		return fmt.Errorf("runsc %s: %w: %s", verb, err, text)
	}
	return nil
}

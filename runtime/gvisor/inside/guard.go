package inside

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// guarded is the argument of the guard.
type guarded struct {
	Terminal  bool
	Processes int64
}

func guardArgv(g guarded, argv []string) ([]string, error) {
	b, err := json.Marshal(g)
	return append([]string{"guard", roleGuard, string(b), "--"}, argv...), err
}

// guardMain starts a command and hands signals on to it until it ends. What it leaves
// behind goes on, unless the other end of the line is gone: then all of it ends.
func guardMain(g guarded, argv []string) error {
	unix.CloseOnExec(lineFD)
	l := os.NewFile(lineFD, "line")
	// So that whatever loses its parent below comes to this process, and can be found.
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		say(l, wordFailed, int(unix.EINVAL))
		return err
	}
	signal.Ignore(syscall.SIGPIPE)
	caught := make(chan os.Signal, 1)
	// Not ignored: the command would ignore them too.
	signal.Notify(caught, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGTSTP, syscall.SIGTTOU, syscall.SIGTTIN,
		syscall.SIGUSR1, syscall.SIGUSR2, syscall.SIGWINCH, syscall.SIGPIPE)
	pid, err := g.start(argv)
	if err != nil {
		var n unix.Errno
		if !errors.As(err, &n) {
			n = unix.EIO
		}
		say(l, wordFailed, int(n))
		return nil
	}
	say(l, wordStarted, 0)
	for _, fd := range []int{0, 1, 2} {
		if fd != 0 || !g.Terminal { // the terminal is asked who is in front
			_ = unix.Close(fd)
		}
	}
	go g.listen(l, pid)
	for {
		var ws unix.WaitStatus
		got, err := unix.Wait4(-1, &ws, 0, nil)
		switch {
		case errors.Is(err, unix.EINTR), err == nil && got != pid:
			continue
		case err != nil:
			return err
		case ws.Signaled():
			say(l, wordKilled, int(ws.Signal()))
		default:
			say(l, wordExited, ws.ExitStatus())
		}
		return nil
	}
}

// start runs the program, found as a shell would.
func (g guarded) start(argv []string) (pid int, err error) {
	if g.Processes > 0 {
		_ = unix.Setrlimit(unix.RLIMIT_NPROC, &unix.Rlimit{Cur: uint64(g.Processes), Max: uint64(g.Processes)})
	}
	attr := &syscall.ProcAttr{Env: os.Environ(), Files: []uintptr{0, 1, 2}, Sys: &syscall.SysProcAttr{Setsid: true}}
	if g.Terminal {
		attr.Sys = &syscall.SysProcAttr{Setpgid: true, Foreground: true, Ctty: 0}
	}
	err = unix.ENOENT
	for _, p := range Candidates(argv[0], os.Getenv("PATH")) {
		var e error
		if pid, e = syscall.ForkExec(p, argv, attr); e == nil {
			return pid, nil
		}
		if !errors.Is(e, unix.ENOENT) && !errors.Is(e, unix.ENOTDIR) {
			err = e
		}
	}
	return 0, err
}

// defaultPath is where programs are where PATH says nothing.
const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// Candidates are the paths at which a program of that name may be, in order.
func Candidates(name, list string) []string {
	if strings.Contains(name, "/") {
		return []string{name}
	}
	if list == "" {
		list = defaultPath
	}
	var out []string
	for dir := range strings.SplitSeq(list, ":") {
		if dir == "" {
			dir = "."
		}
		out = append(out, path.Join(dir, name))
	}
	return out
}

// listen hands on signals, and ends all when nobody is there to send one.
func (g guarded) listen(l *os.File, pid int) {
	var b [1]byte
	for {
		n, err := l.Read(b[:])
		if n == 0 || err != nil {
			endBelow()
			os.Exit(1)
		}
		to := pid
		if g.Terminal {
			if front, err := unix.IoctlGetInt(0, unix.TIOCGPGRP); err == nil && front > 1 {
				to = -front
			}
		}
		_ = unix.Kill(to, syscall.Signal(b[0]))
	}
}

// endBelow ends every process below this one, those that hide from it included.
func endBelow() {
	for range 1000 {
		below, err := descendants(os.Getpid())
		if err == nil && len(below) == 0 {
			return
		}
		for _, pid := range below {
			_ = unix.Kill(pid, unix.SIGKILL)
		}
		for { // what is dead must not be found again
			if pid, err := unix.Wait4(-1, nil, unix.WNOHANG, nil); pid <= 0 || err != nil {
				break
			}
		}
		time.Sleep(time.Millisecond)
	}
}

// descendants lists the processes below one, zombies left out.
func descendants(top int) ([]int, error) {
	parents, err := parentsOf()
	if err != nil {
		return nil, err
	}
	var out []int
	for pid := range parents {
		for up, n := parents[pid], 0; up > 0 && n < 1<<16; up, n = parents[up], n+1 {
			if up == top {
				out = append(out, pid)
				break
			}
		}
	}
	return out, nil
}

// parentsOf reads the parent of every process that lives.
func parentsOf() (map[int]int, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	out := map[int]int{}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		b, err := os.ReadFile("/proc/" + e.Name() + "/stat")
		if err != nil {
			continue
		}
		// The name in brackets may hold anything.
		f := strings.Fields(string(b[strings.LastIndexByte(string(b), ')')+1:]))
		if len(f) < 2 || f[0] == "Z" || f[0] == "X" {
			continue
		}
		if out[pid], err = strconv.Atoi(f[1]); err != nil {
			return nil, fmt.Errorf("/proc/%d/stat: %w", pid, err)
		}
	}
	return out, nil
}

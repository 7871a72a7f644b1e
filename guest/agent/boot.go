package agent

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/files"
)

const (
	self    = "/proc/self/exe"
	ourDir  = "/run/dsec"
	modules = "/modules.order" // one path in each line, from the root, in the order in which they are loaded

	// channelVariable names the channel, "fd:N"; the kernel hands it on from its
	// command line. Without it, it is the first virtio port.
	channelVariable = "DSEC_CHANNEL"
	channelWait     = 30 * time.Second
)

// Main runs what the arguments say and returns the exit code.
func Main(args []string) int {
	var err error
	switch {
	case len(args) > 0 && args[0] == "init":
		runtime.LockOSThread()
		err = insideMain()
	case len(args) > 0 && args[0] == "files":
		err = filesMain()
	case len(args) > 0 && args[0] == "service":
		err = serviceMain(args[1:])
	default:
		err = agentMain()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "dsec-guest:", err)
		return 1
	}
	return 0
}

// filesMain serves the root behind descriptor 4 on descriptor 3.
func filesMain() error {
	f := os.NewFile(3, "files")
	conn, err := net.FileConn(f)
	_ = f.Close()
	if err != nil {
		return err
	}
	return files.MainIn(conn, "/proc/self/fd/4")
}

// agentMain is PID 1 of the machine. It returns when the channel is gone.
func agentMain() error {
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	// Whatever else this process was started with, commands do not get it.
	if err := unix.CloseRange(3, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC); err != nil {
		return os.NewSyscallError("close_range", err)
	}
	if err := boot(log); err != nil {
		return err
	}
	groups, err := ourGroup("/sys/fs/cgroup")
	if err != nil {
		return fmt.Errorf("control groups: %w", err)
	}
	channel, err := openChannel()
	if err != nil {
		return fmt.Errorf("channel: %w", err)
	}
	return newAgent(ourDir, groups, log).serve(channel)
}

// boot makes the machine usable. What is mounted already stays.
func boot(log *slog.Logger) error {
	// Nobody but root with every capability may look into the agent, also while a
	// thread of it is about to become a command.
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return err
	}
	unix.Umask(0o022)
	const walled = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	for _, m := range []struct {
		at, fstype string
		flags      uintptr
		options    string
	}{
		{"/proc", "proc", walled, ""},
		{"/sys", "sysfs", walled, ""},
		{"/dev", "devtmpfs", unix.MS_NOSUID | unix.MS_NOEXEC, "mode=0755"},
		{"/dev/pts", "devpts", unix.MS_NOSUID | unix.MS_NOEXEC, "newinstance,ptmxmode=0666,mode=0620"},
		{"/dev/shm", "tmpfs", walled, "mode=1777"},
		{"/tmp", "tmpfs", walled, "mode=1777"},
		{"/run", "tmpfs", unix.MS_NOSUID | unix.MS_NODEV, "mode=0755"},
		{"/sys/fs/cgroup", "cgroup2", walled, ""},
	} {
		if err := os.MkdirAll(m.at, 0o755); err != nil {
			return err
		}
		if err := unix.Mount(m.fstype, m.at, m.fstype, m.flags, m.options); err != nil && err != unix.EBUSY {
			return fmt.Errorf("mount %s: %w", m.at, err)
		}
	}
	if err := os.MkdirAll(ourDir, 0o700); err != nil {
		return err
	}
	if err := loadModules(); err != nil {
		return err
	}
	// The agent is the last to go when memory is short.
	if err := os.WriteFile("/proc/self/oom_score_adj", []byte("-1000"), 0); err != nil {
		log.Warn("the kernel may kill the agent when memory is short", "err", err)
	}
	if err := linkUp("lo", netip.Prefix{}, 0); err != nil {
		return err
	}
	return nil
}

// loadModules loads what the image lists.
func loadModules() error {
	list, err := os.ReadFile(modules)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(list)) {
		path := strings.TrimSpace(line)
		if path == "" {
			continue
		}
		f, err := os.Open(filepath.Join("/", path))
		if err != nil {
			return err
		}
		err = unix.FinitModule(int(f.Fd()), "", 0)
		_ = f.Close()
		if err != nil && err != unix.EEXIST {
			return fmt.Errorf("load %s: %w", path, err)
		}
	}
	return nil
}

// ourGroup moves the agent into a control group of its own, beside which the
// sandbox's can have controllers.
func ourGroup(root group) (group, error) {
	if err := os.Mkdir(root.file("agent"), 0o755); err != nil && !errors.Is(err, os.ErrExist) {
		return "", err
	}
	if err := root.write("agent/cgroup.procs", strconv.Itoa(os.Getpid())); err != nil {
		return "", err
	}
	have, err := os.ReadFile(root.file("cgroup.controllers"))
	if err != nil {
		return "", err
	}
	for _, c := range strings.Fields(string(have)) {
		if c != "memory" && c != "pids" && c != "cpu" && c != "io" {
			continue
		}
		if err := root.write("cgroup.subtree_control", "+"+c); err != nil {
			return "", err
		}
	}
	return root, nil
}

// openChannel waits for the device: its driver may take a moment.
func openChannel() (io.ReadWriter, error) {
	if name, ok := strings.CutPrefix(os.Getenv(channelVariable), "fd:"); ok {
		fd, err := strconv.Atoi(name)
		if err != nil {
			return nil, err
		}
		f := os.NewFile(uintptr(fd), "channel")
		conn, err := net.FileConn(f)
		_ = f.Close()
		return conn, err
	}
	for deadline := time.Now().Add(channelWait); ; time.Sleep(5 * time.Millisecond) {
		found, err := filepath.Glob("/dev/vport*p1")
		if err != nil {
			return nil, err
		}
		if len(found) > 0 {
			return openPort(found[0])
		}
		if time.Now().After(deadline) {
			return nil, errors.New("no /dev/vport*p1")
		}
	}
}

func openPort(name string) (io.ReadWriter, error) {
	f, err := os.OpenFile(name, os.O_RDWR|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
	if err != nil {
		return nil, err
	}
	return &port{f: f}, nil
}

// port is a virtio port, which says end of file while no host is connected.
type port struct{ f *os.File }

const portAgain = 10 * time.Millisecond

func (p *port) Read(b []byte) (int, error) {
	for {
		n, err := p.f.Read(b)
		if err != io.EOF && !errors.Is(err, unix.EPIPE) {
			return n, err
		}
		time.Sleep(portAgain)
	}
}

// Write of what no host is there to take is lost; the next one begins anew.
func (p *port) Write(b []byte) (int, error) {
	n, err := p.f.Write(b)
	if errors.Is(err, unix.EPIPE) || errors.Is(err, io.ErrUnexpectedEOF) || err == nil && n < len(b) {
		return len(b), nil
	}
	return n, err
}

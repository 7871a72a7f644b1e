package hold

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/version"
)

// Roles are the first argument of dsec-hold.
const (
	roleStart = "hold-start" // joins the cgroups, starts hold-serve in a session of its own, ends
	roleServe = "hold-serve" // is the hold
	roleFiles = "hold-files" // serves the file protocol on stdin

	rolePlain = "hold-plain" // becomes a plain process

	roleAccept = "hold-accept" // says whether it could go on with the state on stdin
	roleResume = "hold-resume" // goes on with the state in the descriptor of that number
)

// daemonConfig is the second argument of start and serve.
type daemonConfig struct {
	Socket  string
	Forkers int
	Join    []string // cgroup.procs files
}

// FilesRole runs the file helper: it serves on the connection until it is
// closed. cmd/dsec-hold gives it; without one the role is refused.
type FilesRole func(c net.Conn) error

// Main runs the role that args name and returns the exit code. args are the
// program's without its name.
func Main(args []string, files FilesRole) int {
	if len(args) == 0 {
		fmt.Fprintln(os.Stderr, "dsec-hold: started by dsec, not by hand")
		return 2
	}
	var err error
	switch args[0] {
	case roleStart:
		err = start(args)
	case roleServe:
		err = runServer(args)
	case roleFiles:
		err = runFiles(files)
	case rolePlain:
		err = runPlain(args)
	case roleAccept:
		err = runAccept()
	case roleResume:
		err = runResume(args)
	default:
		err = fmt.Errorf("unknown role %q", args[0])
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "dsec-hold:", err)
		return 1
	}
	return 0
}

// MainIfAsked is for TestMain of packages whose tests run a hold from the test
// binary itself (Options.Command = SelfCommand()), and so under the race
// detector: if this process was started as one, it is one and never returns.
func MainIfAsked(files FilesRole) {
	if len(os.Args) > 1 && strings.HasPrefix(os.Args[1], "hold-") {
		os.Exit(Main(os.Args[1:], files))
	}
}

// SelfCommand runs this program as a hold; its main must call MainIfAsked.
func SelfCommand() []string { return []string{"/proc/self/exe"} }

func config(args []string) (daemonConfig, error) {
	var c daemonConfig
	if len(args) < 2 {
		return c, errors.New("no configuration")
	}
	return c, json.Unmarshal([]byte(args[1]), &c)
}

// Descriptors the daemon is started with besides stdio.
const (
	readyFD  = 3 // where it says that it listens
	helperFD = 4 // the program that file helpers run
)

func start(args []string) error {
	c, err := config(args)
	if err != nil {
		return err
	}
	for _, j := range c.Join {
		if err := os.WriteFile(j, []byte("0"), 0); err != nil {
			return err
		}
	}
	ready, helper := os.NewFile(readyFD, "ready"), os.NewFile(helperFD, "helper")
	self, err := os.Open("/proc/self/exe")
	if err != nil {
		return err
	}
	_, err = os.StartProcess(fmt.Sprintf("/proc/self/fd/%d", self.Fd()), []string{os.Args[0], roleServe, args[1]}, &os.ProcAttr{
		Dir: "/", Env: os.Environ(), Files: []*os.File{os.Stdin, os.Stdout, os.Stderr, ready, helper}, Sys: &syscall.SysProcAttr{Setsid: true},
	})
	return err
}

func runFiles(files FilesRole) error {
	if files == nil {
		return errors.New("this binary has no file helper")
	}
	c, err := net.FileConn(os.Stdin)
	if err != nil {
		return err
	}
	_ = os.Stdin.Close()
	return files(c)
}

// In a process that becomes a hold, main stays on the first thread from here on:
// the kernel kills forkers and sandboxes with the thread that started them, and
// all threads but one that becomes the first end when a program replaces itself.
var _ = stayOnFirstThread(os.Args)

func stayOnFirstThread(args []string) bool {
	hold := len(args) > 1 && (args[1] == roleServe || args[1] == roleResume || args[1] == rolePlain)
	if hold {
		runtime.LockOSThread()
	}
	return hold
}

// settle makes this process a hold.
func settle() (*slog.Logger, error) {
	if unix.Gettid() != os.Getpid() {
		return nil, errors.New("not on the first thread")
	}
	// Run from a descriptor it would be called by the number of that.
	if err := os.WriteFile("/proc/self/comm", []byte("dsec-hold"), 0); err != nil {
		return nil, err
	}
	debug.SetGCPercent(50)
	// Almost all it does is system calls. One more thread for Go code would
	// mostly be woken for nothing, which costs more than it saves.
	runtime.GOMAXPROCS(max(1, runtime.NumCPU()/8))
	catchSignals()
	return slog.New(slog.NewTextHandler(os.Stderr, nil)), nil
}

var deafTo = []os.Signal{syscall.SIGHUP, syscall.SIGINT, syscall.SIGPIPE}

// catchSignals does nothing about them. Children would inherit signal.Ignore,
// and so would every command.
func catchSignals() { signal.Notify(make(chan os.Signal, 1), deafTo...) }

// runServer is the hold: it returns when it is shut down.
func runServer(args []string) error {
	c, err := config(args)
	if err != nil {
		return err
	}
	log, err := settle()
	if err != nil {
		return err
	}
	ready := os.NewFile(readyFD, "ready")
	s, err := newServer(c, log)
	if err != nil {
		_, _ = ready.WriteString(err.Error())
		return err
	}
	_, _ = ready.WriteString("ok")
	_ = ready.Close()
	log.Info("hold listens", "socket", c.Socket, "pid", os.Getpid(), "version", version.Version)
	return s.run()
}

// run serves until it is shut down.
func (s *server) run() error {
	s.resume()
	go s.sweep()
	s.own()
	s.log.Info("hold ends")
	s.endForkers()
	_ = os.Remove(s.socket)
	s.mu.Lock()
	last := s.client
	s.mu.Unlock()
	if last != nil { // give the reply to the one who asked time to leave
		select {
		case <-last.ctx.Done():
		case <-time.After(drainMost):
		}
	}
	return nil
}

var errRuns = errors.New("a hold runs already")

// Descriptors: what a running command keeps open, its filter's listener included,
// and what commands must leave to sandboxes, helpers and starts.
const (
	fdsOfExec   = 5
	reservedFDs = 8192
)

// emptyServer knows nothing yet.
func emptyServer(socket string, log *slog.Logger) (*server, error) {
	var lim unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &lim) == nil {
		lim.Cur = lim.Max
		_ = unix.Setrlimit(unix.RLIMIT_NOFILE, &lim)
	}
	s := &server{socket: socket, started: time.Now(), log: log, quit: make(chan struct{}), respawn: make(chan respawn), replace: make(chan replacement), births: make(chan *birth), plains: map[string]*plain{},
		store: map[string]*os.File{}, sandboxes: map[string]*sandbox{}, lingering: map[string]struct{}{}, pumps: map[*pump]struct{}{}, refused: newRefusals()}
	s.most = max(64, (int(min(lim.Cur, 1<<30))-reservedFDs)/fdsOfExec)
	s.digest = sync.OnceValue(func() string {
		d, err := digestOf(s.binary)
		if err != nil {
			s.log.Error("read own program", "error", err)
		}
		return d
	})
	var err error
	if s.null, err = openPlain(os.DevNull, unix.O_RDONLY); err != nil {
		return nil, err
	}
	s.image, err = forkerImage()
	return s, err
}

func newServer(c daemonConfig, log *slog.Logger) (*server, error) {
	s, err := emptyServer(c.Socket, log)
	if err != nil {
		return nil, err
	}
	_ = os.WriteFile("/proc/self/oom_score_adj", []byte("-900"), 0) // not permitted everywhere
	if s.lock, err = os.OpenFile(c.Socket+".lock", os.O_RDWR|os.O_CREATE, 0o600); err != nil {
		return nil, err
	}
	if err := unix.Flock(fdOf(s.lock), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, errRuns
	}
	if err := os.Remove(c.Socket); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	if s.lis, err = net.ListenUnix("unixpacket", &net.UnixAddr{Name: c.Socket, Net: "unixpacket"}); err != nil {
		return nil, err
	}
	if err := os.Chmod(c.Socket, 0o600); err != nil {
		return nil, err
	}
	unix.CloseOnExec(helperFD)
	s.binary = os.NewFile(helperFD, "helper")
	n := c.Forkers
	if n <= 0 {
		n = runtime.NumCPU()
	}
	return s, s.startForkers(n)
}

func (s *server) stop() { s.quitOnce.Do(func() { close(s.quit) }) }

// shutdown ends every sandbox and then the hold.
func (s *server) shutdown(ctx context.Context) {
	for _, sb := range s.living() {
		if err := s.remove(ctx, sb); err != nil {
			s.log.Error("shut down", "sandbox", sb.name(), "error", err)
		}
	}
	s.endPlains(ctx)
	_ = s.lis.Close()
	s.stop()
}

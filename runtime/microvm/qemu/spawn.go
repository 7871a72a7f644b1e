package qemu

import (
	"bytes"
	"cmp"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"syscall"

	"github.com/opendsec/dsec/runtime/microvm/vmm"
)

// Command is a process to start, as data: another process can start it too.
type Command struct {
	Path   string
	Args   []string   // without the name
	Files  []*os.File // its descriptors from 3 on
	Output *os.File   // its 1 and 2; 0 is /dev/null
	UID    uint32
	GID    uint32
	Groups []uint32 // more groups: the one of /dev/kvm
}

// Process is one that was started.
type Process interface {
	Pid() int
	Kill()       // SIGKILL; of one that has ended it does nothing
	Wait() error // returns when it has ended, with an error unless its status was 0; called once
}

// Spawner starts a process with the uid and groups, no capabilities, in the
// namespaces and control group that the caller wants for it. The process must end when
// this one does: machines that are to outlive it have a name, and are started by a Keep. The files are the driver's, which closes them when Spawner has
// returned.
type Spawner func(Command) (Process, error)

// Direct starts processes as children, each in network, IPC and host name namespaces
// of its own if this process is root. prepare, if it is not nil, may change how:
// another user, a control group, more namespaces. The mounts stay those of this
// process: a copy of them would keep each of them alive as long as the machine.
func Direct(prepare func(*exec.Cmd)) Spawner {
	return func(c Command) (Process, error) {
		cmd := exec.Command(c.Path, c.Args...)
		cmd.Env = []string{}
		cmd.Dir = "/"
		cmd.ExtraFiles = c.Files
		cmd.Stdout, cmd.Stderr = c.Output, c.Output
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		if os.Geteuid() == 0 {
			cmd.SysProcAttr.Credential = &syscall.Credential{Uid: c.UID, Gid: c.GID, Groups: c.Groups}
			cmd.SysProcAttr.Cloneflags = syscall.CLONE_NEWNET | syscall.CLONE_NEWIPC | syscall.CLONE_NEWUTS
		}
		if prepare != nil {
			prepare(cmd)
		}
		if err := starter()(cmd); err != nil {
			return nil, err
		}
		return child{cmd}, nil
	}
}

type child struct{ cmd *exec.Cmd }

func (c child) Pid() int    { return c.cmd.Process.Pid }
func (c child) Kill()       { _ = c.cmd.Process.Kill() }
func (c child) Wait() error { return c.cmd.Wait() }

// starter starts commands from one thread that lives as long as this process: the
// signal that ends a child with its parent is sent when the thread ends that
// started it.
var starter = sync.OnceValue(func() func(*exec.Cmd) error {
	type job struct {
		cmd *exec.Cmd
		err chan error
	}
	jobs := make(chan job)
	go func() {
		runtime.LockOSThread()
		for j := range jobs {
			j.err <- j.cmd.Start()
		}
	}()
	return func(cmd *exec.Cmd) error {
		j := job{cmd, make(chan error, 1)}
		jobs <- j
		return <-j.err
	}
})

// maxSaid is how much is kept of what QEMU and the guest's console said.
const maxSaid = 16 << 10

// tail keeps the end of what it is written.
type tail struct {
	most int // bytes; 0: maxSaid
	mu   sync.Mutex
	kept []byte
}

// maxConsole is how much is kept of one whose console is of use to somebody.
const maxConsole = 256 << 10

func newTail(s vmm.Shape) *tail {
	if s.Firmware {
		return &tail{most: maxConsole}
	}
	return &tail{most: maxSaid}
}

func (t *tail) bytes() []byte {
	t.mu.Lock()
	defer t.mu.Unlock()
	return bytes.Clone(t.kept)
}

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	most := cmp.Or(t.most, maxSaid)
	t.kept = append(t.kept, p[max(0, len(p)-most):]...)
	if over := len(t.kept) - most; over > 0 {
		t.kept = append(t.kept[:0], t.kept[over:]...)
	}
	return len(p), nil
}

// String is the end of it, for an error: printable, in one line.
func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	b := bytes.TrimSpace(t.kept)
	b = bytes.TrimSpace(b[max(0, len(b)-600):])
	if len(b) == 0 {
		return "it said nothing"
	}
	return "it said: " + strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f || r == 0xfffd {
			return ' '
		}
		return r
	}, string(b))
}

// follow copies what comes from r until its end, and closes it.
func (t *tail) follow(r *os.File) {
	_, _ = io.Copy(t, r)
	_ = r.Close()
}

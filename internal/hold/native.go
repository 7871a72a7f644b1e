package hold

import (
	"bytes"
	"embed"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/linux"
)

//go:embed all:native/bin
var nativeBin embed.FS

// ErrNotBuilt says that a binary was not there when this program was built.
var ErrNotBuilt = errors.New("not embedded in this binary: build with make")

// steps name what the C program does, in the order of its enum.
var steps = []string{"", "hide the machine's mounts", "clone", "set oom_score_adj", "join cgroup", "join namespaces", "fork",
	"read exec image", "open terminal", "set stdio", "set rlimit", "drop capability", "set groups", "set uid",
	"set no_new_privs", "set seccomp filter", "set capabilities", "chdir", "exec", "make proc", "mount"}

const (
	stepClone = 2
	stepTasks = 4
	stepSetns = 5
	stepFork  = 6
	stepImage = 7
	stepCwd   = 17
	stepExec  = 18
	stepPlan  = 20
)

// answer is what the C program says: at which step it stands or broke off.
type answer struct {
	Step, Errno int32
	PID         int32 // of the new process
	Self        int32 // of who says it
}

func (a answer) ok() bool { return a.Step == 0 && a.Errno == 0 }

func (a answer) stepName() string {
	if a.Step >= stepPlan {
		return steps[stepPlan]
	}
	if a.Step >= 0 && int(a.Step) < len(steps) {
		return steps[a.Step]
	}
	return fmt.Sprintf("step %d", a.Step)
}

func (a answer) errno() error {
	if a.Errno == 0 {
		return nil
	}
	return syscall.Errno(a.Errno)
}

const (
	nativeSpawn = 1
	nativeExec  = 2
	nativeMemfd = 1 // flag of exec

	requestHeader = 16
	inlineImage   = 60 << 10 // longer exec images travel in a memfd
)

// nativeFormat is raised with every change of what forkers, PID 1s and we say
// to each other: after an upgrade of the hold they are the old ones. Only tests
// change it.
var nativeFormat = 1

// forker is one single-threaded process that forks for us. It serves one
// request at a time.
type forker struct {
	ended chan struct{} // closed when it was reaped

	one sync.Mutex // held by a request that waits for its answer

	mu   sync.Mutex
	c    *packets
	proc *os.Process
}

func (k *forker) conn() *packets {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.c
}

// forkerImage is a sealed memfd with the C program.
func forkerImage() (*os.File, error) {
	b, err := nativeBin.ReadFile("native/bin/forker-" + runtime.GOARCH)
	if err != nil {
		return nil, dsec.E(dsec.Unsupported, "start forker", runtime.GOARCH, ErrNotBuilt)
	}
	return linux.SealedFile("init", b)
}

// startForker must run on a thread that lives as long as we do: the kernel ties
// "kill the child when the parent dies" to the thread.
func startForker(image *os.File) (k *forker, err error) {
	c, theirs, err := packetPair()
	if err != nil {
		return nil, err
	}
	defer func() {
		if _ = theirs.Close(); err != nil {
			_ = c.Close()
		}
	}()
	proc, err := os.OpenFile("/proc", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer func() { _ = proc.Close() }()
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer func() { _ = null.Close() }()
	p, err := os.StartProcess(fmt.Sprintf("/proc/self/fd/%d", fdOf(image)), []string{"init"}, &os.ProcAttr{
		Dir: "/", Env: []string{}, Files: []*os.File{null, null, null, theirs, proc},
		Sys: &syscall.SysProcAttr{Setsid: true, Pdeathsig: syscall.SIGKILL},
	})
	if err != nil {
		return nil, dsec.E(dsec.Internal, "start forker", "", err)
	}
	return &forker{c: c, proc: p, ended: make(chan struct{})}, nil
}

// exec sends an exec request, which the forker does not answer itself. One that
// was killed is given the time to be replaced.
func (k *forker) exec(image []byte, tasks int, files []*os.File) error {
	var flags uint32
	if len(image) > inlineImage {
		m, err := linux.SealedFile("exec", image)
		if err != nil {
			return err
		}
		defer func() { _ = m.Close() }()
		flags, image, files = nativeMemfd, nil, append([]*os.File{m}, files...)
	}
	b := append(request(nativeExec, flags, 0, tasks), image...)
	limit := time.Now().Add(respawnWait)
	for {
		err := k.conn().send(b, files)
		if err == nil {
			return nil
		}
		if time.Now().After(limit) {
			return dsec.E(dsec.Internal, "ask forker", "", err)
		}
		time.Sleep(time.Millisecond) // rare, and nothing tells when it is there
	}
}

// request is struct request of the forker.
func request(op, flags, owner uint32, count int) []byte {
	b := binary.LittleEndian.AppendUint32(make([]byte, 0, requestHeader), op)
	b = binary.LittleEndian.AppendUint32(b, flags)
	b = binary.LittleEndian.AppendUint32(b, owner)
	return binary.LittleEndian.AppendUint32(b, uint32(count))
}

// call sends a request and waits for its answer.
func (k *forker) call(req []byte, files []*os.File) (answer, *os.File, error) {
	k.one.Lock()
	defer k.one.Unlock()
	c := k.conn()
	if err := c.send(req, files); err != nil {
		return answer{}, nil, dsec.E(dsec.Internal, "ask forker", "", err)
	}
	a, got, err := c.answer()
	if err != nil {
		return answer{}, nil, dsec.E(dsec.Internal, "ask forker", "", err)
	}
	if len(got) > 0 {
		return a, got[0], nil
	}
	return a, nil, nil
}

func parseAnswer(b, oob []byte) (answer, []*os.File, error) {
	files, err := receivedFiles(oob)
	if err != nil {
		return answer{}, nil, err
	}
	if len(b) == 0 {
		return answer{}, nil, net.ErrClosed
	}
	var a answer
	if err := binary.Read(bytes.NewReader(b), binary.LittleEndian, &a); err != nil {
		closeAll(files)
		return answer{}, nil, err
	}
	return a, files, nil
}

// fdOf is f.Fd without making f blocking.
func fdOf(f *os.File) int {
	fd := -1
	if rc, err := f.SyscallConn(); err == nil {
		_ = rc.Control(func(v uintptr) { fd = int(v) })
	}
	return fd
}

// deadline of waits for our own code in a sandbox, which runs under the
// sandbox's CPU quota.
const nativeWait = 30 * time.Second

// respawnWait is how long the replacement of a killed forker may take.
const respawnWait = 2 * time.Second

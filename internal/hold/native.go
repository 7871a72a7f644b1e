package hold

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net"
	"os"
	"syscall"
	"time"
)

// steps name what the C program does, in the order of its enum.
var steps = []string{"", "hide the machine's mounts", "clone", "set oom_score_adj", "join cgroup", "join namespaces", "fork",
	"read exec image", "open terminal", "set stdio", "set rlimit", "drop capability", "set groups", "set uid",
	"set no_new_privs", "set seccomp filter", "set capabilities", "chdir", "exec", "make proc", "set AppArmor profile", "set landlock rules", "mount"}

const (
	stepClone = 2
	stepTasks = 4
	stepSetns = 5
	stepFork  = 6
	stepImage = 7
	stepCwd   = 17
	stepExec  = 18
	stepPlan  = 22
)

// answer is what the C program says: at which step it stands or broke off.
type answer struct {
	Step, Errno int32
	PID         int32 // of the new process; pidListener: the descriptor is a filter's listener
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

const pidListener = -1

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
var nativeFormat = 4

// request is struct request of the forker.
func request(op, flags, owner uint32, count int) []byte {
	b := binary.LittleEndian.AppendUint32(make([]byte, 0, requestHeader), op)
	b = binary.LittleEndian.AppendUint32(b, flags)
	b = binary.LittleEndian.AppendUint32(b, owner)
	return binary.LittleEndian.AppendUint32(b, uint32(count))
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

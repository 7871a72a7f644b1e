// Package inside is what dsec-hold becomes beside and inside a gVisor sandbox: small
// programs in roles, found by the first argument. runsc is their only tool.
//
// On the host side, in the namespaces of the sandbox's shell, outside of gVisor:
//
//	gvisor-run    starts runsc, and ends when the sentry does
//	gvisor-exec   is a command as the hold sees it: it has one started inside, hands
//	              signals on, and ends as it ends
//	gvisor-dial   gives a socket to a file service inside, or to what joins it with a port
//	gvisor-save   ends what runs inside, and writes the upper layer down
//	gvisor-pause  has the sentry stop all tasks, and gvisor-resume has it go on
//
// Inside, run from a descriptor, so there is no file of ours:
//
//	gvisor-init   PID 1: writes what the sandbox finds about itself, then only reaps
//	gvisor-guard  parent of one command; the other end of its socket is gvisor-exec,
//	              and when that is gone it ends the command and all it has started
//	gvisor-serve  the file service, as one user
//	gvisor-join   passes bytes between a socket and a port
//	gvisor-end    ends every process but PID 1
//
// Those inside are processes of the sandbox and can be harmed by its root, as the
// command itself can; nothing outside believes more of them than how a command ended.
package inside

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"
)

// Prefix of all roles.
const Prefix = "gvisor-"

// Roles on the host side, and what they take as one JSON argument.
const (
	RoleRun  = Prefix + "run"  // Run
	RoleExec = Prefix + "exec" // Command, then "--", program and arguments
	RoleDial = Prefix + "dial" // Service
	RoleSave = Prefix + "save" // Save

	RolePause  = Prefix + "pause"  // Runsc
	RoleResume = Prefix + "resume" // Runsc
)

const (
	roleInit  = Prefix + "init"
	roleGuard = Prefix + "guard"
	roleServe = Prefix + "serve"
	roleJoin  = Prefix + "join"
	roleEnd   = Prefix + "end"
)

// StateDir is runsc's directory in a shell.
const StateDir = "/run"

// Runsc is how it is called: the program, its flags for this sandbox, and the name
// that the sandbox has in its state directory.
type Runsc struct {
	Path  string
	Flags []string
	Name  string
}

// Run is the argument of RoleRun: a bundle to run.
type Run struct {
	Runsc
	Bundle string
}

// Who is the user of something inside.
type Who struct {
	UID, GID uint32
	Groups   []uint32 `json:",omitempty"`
	// Bounding set, and what root has of it, as bits.
	Bounding  uint64
	Permitted uint64
}

// Command is the argument of RoleExec.
type Command struct {
	Runsc
	Who
	Env        []string
	Cwd        string
	NoNewPrivs bool
	Terminal   bool
	Processes  int64 // of its user; 0: any number
}

// Service is the argument of RoleDial: a socket that something inside is to have.
type Service struct {
	Runsc
	Who
	Socket string // that is dialed
	Port   uint16 // it is joined with; 0: it has the file service
}

// Save is the argument of RoleSave.
type Save struct {
	Runsc
	File string // that is replaced when the new one is whole
}

// InitArgv is what PID 1 inside is started with.
func InitArgv(s Setup) ([]string, error) {
	b, err := json.Marshal(s)
	return []string{"init", roleInit, string(b)}, err
}

// Main is the program in a role.
func Main(args []string) int {
	var err error
	switch args[0] {
	case RoleRun:
		err = with(args, func(r Run) error { return runMain(r) })
	case RoleExec:
		err = with(args, func(c Command) error { return execMain(c, args[3:]) })
	case RoleDial:
		err = with(args, dialMain)
	case RoleSave:
		err = with(args, saveMain)
	case RolePause:
		err = with(args, func(r Runsc) error { return r.pause() })
	case RoleResume:
		err = with(args, func(r Runsc) error { return r.resume() })
	case roleInit:
		err = with(args, initMain)
	case roleGuard:
		err = with(args, func(g guarded) error { return guardMain(g, args[3:]) })
	case roleServe:
		err = serveMain()
	case roleJoin:
		err = with(args, connectMain)
	case roleEnd:
		err = endMain()
	default:
		err = fmt.Errorf("unknown role %q", args[0])
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, strings.TrimPrefix(args[0], Prefix)+":", err)
		return 1
	}
	return 0
}

func with[T any](args []string, f func(T) error) error {
	var v T
	if len(args) < 2 {
		return fmt.Errorf("%s: no argument", args[0])
	}
	if err := json.Unmarshal([]byte(args[1]), &v); err != nil {
		return err
	}
	return f(v)
}

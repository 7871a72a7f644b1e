package hold

import (
	"context"
	"errors"
	"os"
	"syscall"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/process"
)

var errNotYet = errors.New("not in this build")

func notYet(op string) error { return dsec.E(dsec.Unsupported, op, "", errNotYet) }

// Client is the one client of a hold.
type Client struct {
	info   Info
	events chan Event
	done   chan struct{}
}

// Ensure connects to the hold behind o.Socket, and starts one if none runs: a
// session of its own, in its own cgroup, nobody's child.
func Ensure(ctx context.Context, o Options) (*Client, error) { return nil, notYet("start hold") }

// Dial connects to a running hold. Another live client is Conflict, no hold
// Unavailable.
func Dial(ctx context.Context, socket string) (*Client, error) { return nil, notYet("dial hold") }

// Info says what is at the other end.
func (c *Client) Info() Info { return c.info }

// Done is closed when the connection is lost: every call fails Unavailable.
func (c *Client) Done() <-chan struct{} { return c.done }

// Close leaves the hold, which goes on.
func (c *Client) Close() error { return nil }

// Shutdown ends every sandbox and the hold itself.
func (c *Client) Shutdown(ctx context.Context) error { return notYet("shut down hold") }

// Put keeps a descriptor under a name, replacing one that is there.
func (c *Client) Put(ctx context.Context, name string, f *os.File) error { return notYet("put") }

// Get returns a duplicate of a kept descriptor; NotFound.
func (c *Client) Get(ctx context.Context, name string) (*os.File, error) { return nil, notYet("get") }

// Drop closes a kept descriptor; an unknown name is a success.
func (c *Client) Drop(ctx context.Context, name string) error { return notYet("drop") }

// Names lists what is kept under names that begin with prefix.
func (c *Client) Names(ctx context.Context, prefix string) ([]string, error) {
	return nil, notYet("list names")
}

// Spawn makes a shell. AlreadyExists if the id is known.
func (c *Client) Spawn(ctx context.Context, s SpawnSpec) (*Shell, error) { return nil, notYet("spawn") }

// Enter gives a shell its root; once per shell.
func (c *Client) Enter(ctx context.Context, s EnterSpec) error { return notYet("enter") }

// Exec starts a command. Errors of its own making name the step: FileNotFound
// and PermissionDenied for program and cwd, Invalid for arguments too long.
func (c *Client) Exec(ctx context.Context, s ExecSpec) (process.Process, error) {
	return nil, notYet("exec")
}

// Process finds a command that runs or waits for Release; NotFound.
func (c *Client) Process(ctx context.Context, sandbox, exec string) (process.Process, error) {
	return nil, notYet("find exec")
}

// HoldClock stops or continues the clocks of the commands of a sandbox, those
// started later included.
func (c *Client) HoldClock(ctx context.Context, sandbox string, held bool) error {
	return notYet("hold clock")
}

// SignalInit sends a signal to nobody but PID 1 of the sandbox, which ignores
// all but SIGKILL.
func (c *Client) SignalInit(ctx context.Context, sandbox string, sig syscall.Signal) error {
	return notYet("signal init")
}

// KillSandbox ends every process of a sandbox and returns when they are gone.
// Unknown and ended ones succeed. What hold knows stays until RemoveSandbox.
func (c *Client) KillSandbox(ctx context.Context, sandbox string) error {
	return notYet("kill sandbox")
}

// RemoveSandbox kills it and forgets it with its commands, spools and exec
// cgroups. Unknown ones succeed.
func (c *Client) RemoveSandbox(ctx context.Context, sandbox string) error {
	return notYet("remove sandbox")
}

// StartFiles starts a file helper as a user inside the user and mount
// namespaces of a sandbox, and returns the socket it serves on. It ends when
// the socket is closed, and with the sandbox.
func (c *Client) StartFiles(ctx context.Context, s FilesSpec) (*os.File, error) {
	return nil, notYet("start files")
}

// OpenIn opens a path for reading inside a sandbox's root, links followed
// there, and returns a regular file; used for /etc/passwd before a command.
func (c *Client) OpenIn(ctx context.Context, sandbox, path string) (*os.File, error) {
	return nil, notYet("open in sandbox")
}

// Namespaces returns the user and network namespace of a live sandbox.
func (c *Client) Namespaces(ctx context.Context, sandbox string) (*Shell, error) {
	return nil, notYet("get namespaces")
}

// List tells everything hold knows.
func (c *Client) List(ctx context.Context) ([]SandboxInfo, error) { return nil, notYet("list") }

// Events returns the channel of ends: those not acknowledged before come
// first. It is closed when the connection is lost. One receiver; it must
// receive, else calls of this client stall.
func (c *Client) Events() <-chan Event { return c.events }

// Ack says that an event was recorded.
func (c *Client) Ack(ctx context.Context, e Event) error { return notYet("ack") }

package hold

import (
	"context"
	"os"
	"syscall"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/process"
)

// Shutdown ends every sandbox and the hold itself.
func (c *Client) Shutdown(ctx context.Context) error {
	err := c.call(ctx, opShutdown, nil, nil, nil)
	_ = c.w.c.Close() // it waits for us to leave
	return err
}

// Put keeps a descriptor under a name, replacing one that is there.
func (c *Client) Put(ctx context.Context, name string, f *os.File) error {
	return c.call(ctx, opPut, wireName{name}, []*os.File{f}, nil)
}

// Get returns a duplicate of a kept descriptor; NotFound.
func (c *Client) Get(ctx context.Context, name string) (*os.File, error) {
	return c.oneFile(ctx, opGet, wireName{name})
}

func (c *Client) oneFile(ctx context.Context, o op, body any) (*os.File, error) {
	files, err := c.callFiles(ctx, o, body, nil, 1)
	if err != nil {
		return nil, err
	}
	return files[0], nil
}

// Drop closes a kept descriptor; an unknown name is a success.
func (c *Client) Drop(ctx context.Context, name string) error {
	return c.call(ctx, opDrop, wireName{name}, nil, nil)
}

// Names lists what is kept under names that begin with prefix.
func (c *Client) Names(ctx context.Context, prefix string) ([]string, error) {
	var w wireNames
	err := c.call(ctx, opNames, wireName{prefix}, nil, &w)
	return w.Names, err
}

// Spawn makes a shell. AlreadyExists if the id is known.
func (c *Client) Spawn(ctx context.Context, s SpawnSpec) (*Shell, error) {
	var files []*os.File
	if s.Sys != nil {
		files = append(files, s.Sys)
	}
	id := s.ID
	w := wireSpawn{SpawnSpec: s, HasSys: s.Sys != nil}
	w.Sys = nil
	f, ok, err := c.request(ctx, opSpawn, w, files, func(frame) {
		_ = c.RemoveSandbox(context.WithoutCancel(ctx), id)
	})
	if err != nil {
		return nil, err
	}
	return shell(f, ok, false)
}

// shell takes an answer with a user and a network namespace, and a mount namespace
// if that is wanted too.
func shell(f frame, ok, mounts bool) (*Shell, error) {
	var w wireShell
	want := 2
	if mounts {
		want = 3
	}
	got, err := wantFiles(f, ok, &w, want)
	if err != nil {
		return nil, err
	}
	s := &Shell{UserNS: got[0], NetNS: got[1], PID: w.PID}
	if mounts {
		s.MountNS = got[2]
	}
	return s, nil
}

// Close closes the files.
func (s *Shell) Close() {
	for _, f := range []*os.File{s.UserNS, s.NetNS, s.MountNS} {
		if f != nil {
			_ = f.Close()
		}
	}
}

// Enter gives a shell its root; once per shell. After an error the sandbox can
// only be removed, under either of its ids.
func (c *Client) Enter(ctx context.Context, s EnterSpec) error {
	if s.Root == nil {
		return dsec.Errorf(dsec.Invalid, "enter sandbox", s.ID, "no root is given")
	}
	w := wireEnter{ID: s.ID, As: s.As, Hostname: s.Hostname}
	files := []*os.File{s.Root}
	for _, m := range s.Mounts {
		w.Mounts = append(w.Mounts, wireMount{HasSource: m.Source != nil, Target: m.Target, Size: m.Size, Mode: m.Mode, RO: m.RO, Exec: m.Exec})
		if m.Source != nil {
			files = append(files, m.Source)
		}
	}
	if len(files) > maxFiles-1 {
		return dsec.Errorf(dsec.Invalid, "enter sandbox", s.ID, "%d mounts, at most %d", len(s.Mounts), maxFiles-2)
	}
	return c.call(ctx, opEnter, w, files, nil)
}

// Exec starts a command. Errors of its own making name the step: FileNotFound
// and PermissionDenied for program and cwd, Invalid for arguments too long.
func (c *Client) Exec(ctx context.Context, s ExecSpec) (process.Process, error) {
	p := c.command(s.Sandbox, s.Spec)
	f, ok, err := c.request(ctx, opExec, &s, nil, func(frame) {
		ctx := context.WithoutCancel(ctx)
		p := c.command(s.Sandbox, s.Spec)
		if p.Kill(ctx) == nil {
			if _, err := p.Wait(ctx); err == nil {
				_ = p.Release(ctx)
			}
		}
	})
	return p.found(f, ok, err)
}

// Process finds a command that runs or waits for Release; NotFound.
func (c *Client) Process(ctx context.Context, sandbox, exec string) (process.Process, error) {
	p := c.command(sandbox, process.Spec{ID: exec})
	f, ok, err := c.request(ctx, opFind, p.ref(), nil, nil)
	return p.found(f, ok, err)
}

// HoldClock stops or continues the clocks of the commands of a sandbox, those
// started later included.
func (c *Client) HoldClock(ctx context.Context, sandbox string, held bool) error {
	return c.call(ctx, opClock, wireRef{Sandbox: sandbox, Held: held}, nil, nil)
}

// SignalInit sends a signal to PID 1 of the sandbox alone, which ignores all
// but SIGKILL.
func (c *Client) SignalInit(ctx context.Context, sandbox string, sig syscall.Signal) error {
	return c.call(ctx, opSignalInit, wireRef{Sandbox: sandbox, Signal: int(sig)}, nil, nil)
}

// KillSandbox ends every process of a sandbox and returns when they are gone.
// Unknown and ended ones succeed. What hold knows stays until RemoveSandbox. A
// frozen sandbox must be thawed first, or while this waits.
func (c *Client) KillSandbox(ctx context.Context, sandbox string) error {
	return c.call(ctx, opKillSandbox, wireRef{Sandbox: sandbox}, nil, nil)
}

// RemoveSandbox kills it and forgets it with its commands, spools and exec
// cgroups. Unknown ones succeed.
func (c *Client) RemoveSandbox(ctx context.Context, sandbox string) error {
	err := c.call(ctx, opRemove, wireRef{Sandbox: sandbox}, nil, nil)
	if err == nil {
		c.ends.removed(sandbox)
	}
	return err
}

// StartFiles starts a file helper as a user inside the user and mount
// namespaces of a sandbox, and returns the stream socket it serves on. It ends
// when the socket is closed, and with the sandbox.
func (c *Client) StartFiles(ctx context.Context, s FilesSpec) (*os.File, error) {
	return c.oneFile(ctx, opFiles, s)
}

// OpenIn opens a regular file of a sandbox's root for reading, links followed
// there; it crosses no mount. For /etc/passwd before a command.
func (c *Client) OpenIn(ctx context.Context, sandbox, path string) (*os.File, error) {
	return c.oneFile(ctx, opOpenIn, wireRef{Sandbox: sandbox, Path: raw(path)})
}

// Namespaces returns the user, network and mount namespace of a live sandbox.
func (c *Client) Namespaces(ctx context.Context, sandbox string) (*Shell, error) {
	f, ok, err := c.request(ctx, opNamespaces, wireRef{Sandbox: sandbox}, nil, nil)
	if err != nil {
		return nil, err
	}
	return shell(f, ok, true)
}

// List tells everything hold knows.
func (c *Client) List(ctx context.Context) ([]SandboxInfo, error) {
	var w []wireSandboxInfo
	if err := c.call(ctx, opList, nil, nil, &w); err != nil {
		return nil, err
	}
	list := make([]SandboxInfo, len(w))
	for i, x := range w {
		list[i] = x.SandboxInfo
		for _, e := range x.Execs {
			list[i].Execs = append(list[i].Execs, e.info())
		}
	}
	return list, nil
}

// Refusals returns the batch of what was refused, and its number, after that of number
// written, which the caller has written down and the hold forgets. Who does not know a
// number says 0, and may get what an earlier client has written. Empty: there is none.
func (c *Client) Refusals(ctx context.Context, written uint64) ([]Refusal, uint64, error) {
	var b refusalBatch
	err := c.call(ctx, opRefusals, wireRefusals{Written: written}, nil, &b)
	return b.List, b.Number, err
}

// Ack says that an event was recorded.
func (c *Client) Ack(ctx context.Context, e Event) error {
	return c.tell(ctx, opAck, wireRef{Sandbox: e.Sandbox, Exec: e.Exec, Type: e.Type})
}

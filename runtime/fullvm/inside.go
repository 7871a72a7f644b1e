package fullvm

import (
	"context"
	"net"
	"path"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/confine"
	"github.com/opendsec/dsec/files"
	"github.com/opendsec/dsec/guest"
	"github.com/opendsec/dsec/process"
	"github.com/opendsec/dsec/runtime/tier"
)

// allCaps is every capability there is: root of the machine is root of nothing else.
const allCaps = 1<<41 - 1

// startLimit is how long the start of a command may take.
const startLimit = 45 * time.Second

// command is one as the guest is told it.
func command(rec *record, s process.Spec) guest.Exec {
	return guest.Exec{Command: guest.NewCommand(s), Caps: allCaps, NoNewPrivs: rec.Request.Spec.NoNewPrivs, OOMScoreAdj: confine.OOMScoreAdj}
}

// translate names a sandbox that has ended as the reason for which its guest does not answer.
func (sb *sandbox) translate(op string, err error) error {
	return sb.Explain(op, err, func() bool {
		sb.Mu.Lock()
		vm := sb.vm
		sb.Mu.Unlock()
		return vm == nil || tier.IsDone(vm.Done())
	})
}

// Exec starts a command. A context that ends while it starts does not stop it.
func (r *Runtime) Exec(ctx context.Context, id dsec.SandboxID, s process.Spec) (process.Process, error) {
	const op = "exec in sandbox"
	switch {
	case len(s.Argv) == 0 || s.Argv[0] == "":
		return nil, dsec.Errorf(dsec.Invalid, op, string(id), "no program")
	case s.Cwd != "" && !path.IsAbs(s.Cwd):
		return nil, dsec.Errorf(dsec.Invalid, op, string(id), "working directory %s is not absolute", dsec.Quote(s.Cwd))
	}
	sb, c, err := r.agent(ctx, op, id)
	if err != nil {
		return nil, err
	}
	if sb.IsPaused() {
		return nil, dsec.Errorf(dsec.IllegalState, op, string(id), "it is paused")
	}
	if err := ctx.Err(); err != nil {
		return nil, dsec.E(dsec.ClassOf(err), op, string(id), context.Cause(ctx))
	}
	rec := sb.record()
	if rec == nil {
		return nil, dsec.Errorf(dsec.SandboxGone, op, string(id), "it has ended")
	}
	if s.ID == "" {
		s.ID = dsec.Random(20)
	}
	// Once begun it is finished: undoing a start could end a command that an earlier
	// call with the same id had started.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), startLimit)
	defer cancel()
	p, err := c.Exec(ctx, command(rec, s))
	if err != nil {
		return nil, sb.translate(op, err)
	}
	r.watchCommand(sb, c, p)
	return r.commandOf(sb, p), nil
}

// commandOf is one in a guest. The session that it was started by may end before it, and so may the agent that knew it.
func (r *Runtime) commandOf(sb *sandbox, p process.Process) process.Process {
	find := func(ctx context.Context) (process.Process, error) {
		_, c, err := r.agent(ctx, "find command", sb.ID)
		if err != nil {
			return nil, err
		}
		return c.Process(ctx, p.Spec().ID)
	}
	explain := func(err error) error { return sb.translate("reach command in sandbox", err) }
	return &tier.SessionCommand{Process: p, Box: &sb.Box, Find: find, Explain: explain, Forgets: true}
}

// Process finds a command that runs or waits for Release.
func (r *Runtime) Process(ctx context.Context, id dsec.SandboxID, exec string) (process.Process, error) {
	const op = "find command"
	sb, c, err := r.agent(ctx, op, id)
	if err != nil {
		return nil, err
	}
	p, err := c.Process(ctx, exec)
	if err != nil {
		return nil, sb.translate(op, err)
	}
	return r.commandOf(sb, p), nil
}

// Files opens the file service of a sandbox that runs: the file system of one that does not is the
// guest's, and this machine's kernel reads none of a guest.
func (r *Runtime) Files(ctx context.Context, id dsec.SandboxID, user string) (files.FS, error) {
	const op = "open files"
	if _, err := r.files(ctx, op, id, user); err != nil {
		return nil, err
	}
	sb, err := r.boxes.Find(op, id)
	if err != nil {
		return nil, dsec.Errorf(dsec.SandboxGone, op, string(id), "no such sandbox")
	}
	return &tier.FileService{Explain: func(err error) error { return sb.translate("reach files of sandbox", err) }, Open: func(ctx context.Context) (*files.Redialing, error) { return r.files(ctx, op, id, user) }}, nil
}

// files is the service of a user in the session that there is now.
func (r *Runtime) files(ctx context.Context, op string, id dsec.SandboxID, user string) (*files.Redialing, error) {
	if sb, err := r.boxes.Find(op, id); err == nil && sb.GetPhase() == tier.Stopped {
		return nil, dsec.Errorf(dsec.Unsupported, op, string(id), "files of a stopped sandbox cannot be read in the %s tier; start it", r.Tier())
	}
	sb, c, err := r.agent(ctx, op, id)
	if err != nil {
		return nil, err
	}
	fs, err := sb.services.Get(ctx, user, c, func(ctx context.Context) (*files.Redialing, error) { return c.Files(ctx, user) })
	return fs, sb.translate(op, err)
}

// Dial connects to a port of the machine's own loopback.
func (r *Runtime) Dial(ctx context.Context, id dsec.SandboxID, port uint16) (net.Conn, error) {
	const op = "dial"
	sb, c, err := r.agent(ctx, op, id)
	if err != nil {
		return nil, err
	}
	conn, err := c.Dial(ctx, port)
	return conn, sb.translate(op, err)
}

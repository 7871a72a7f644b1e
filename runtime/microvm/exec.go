package microvm

import (
	"context"
	"path"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/confine"
	"github.com/opendsec/dsec/guest"
	"github.com/opendsec/dsec/process"
	"github.com/opendsec/dsec/runtime/tier"
)

// startLimit is how long the start of a command may take.
const startLimit = 45 * time.Second

// Exec starts a command. A context that ends while it starts does not stop it.
func (r *Runtime) Exec(ctx context.Context, id dsec.SandboxID, s process.Spec) (process.Process, error) {
	const op = "exec in sandbox"
	sb, err := r.boxes.Live(op, id)
	if err != nil {
		return nil, err
	}
	if s.ID == "" {
		s.ID = dsec.Random(20)
	}
	if sb.IsPaused() {
		return nil, dsec.Errorf(dsec.IllegalState, op, string(id), "the sandbox is paused")
	}
	if err := ctx.Err(); err != nil {
		return nil, dsec.E(dsec.ClassOf(err), op, string(id), context.Cause(ctx))
	}
	// Once begun it is finished: undoing a start could end a command that an earlier
	// call with the same id had started.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), startLimit)
	defer cancel()
	p, err := r.start(ctx, sb, s)
	if err != nil {
		return nil, r.explain(op, sb, err)
	}
	return p, nil
}

// start makes of a command's spec what the guest needs and starts it.
func (r *Runtime) start(ctx context.Context, sb *sandbox, s process.Spec) (process.Process, error) {
	if len(s.Argv) == 0 || s.Argv[0] == "" {
		return nil, dsec.Errorf(dsec.Invalid, "exec in sandbox", string(sb.ID), "no program")
	}
	if s.Cwd != "" && !path.IsAbs(s.Cwd) {
		return nil, dsec.Errorf(dsec.Invalid, "exec in sandbox", string(sb.ID), "working directory %s is not absolute", dsec.Quote(s.Cwd))
	}
	c, err := r.session(ctx, sb)
	if err != nil {
		return nil, err
	}
	rec := sb.record()
	if rec == nil {
		return nil, dsec.Errorf(dsec.SandboxGone, "exec in sandbox", string(sb.ID), "the sandbox has ended")
	}
	spec := rec.Request.Spec
	profile, err := confine.ParseProfile(spec.Profile)
	if err != nil {
		return nil, err
	}
	p, err := c.Exec(ctx, guest.Exec{Command: guest.NewCommand(s), Caps: capsOf(profile), NoNewPrivs: spec.NoNewPrivs, OOMScoreAdj: confine.OOMScoreAdj})
	if err != nil {
		return nil, err
	}
	r.watchCommand(sb, p)
	return r.commandOf(sb, p), nil
}

// capsOf a profile but MKNOD, which in a container makes nothing that can be opened, and in
// a machine would.
func capsOf(p confine.Profile) uint64 {
	return uint64(confine.Capabilities(p)) &^ (1 << unix.CAP_MKNOD)
}

// Process finds a command that runs or waits for Release.
func (r *Runtime) Process(ctx context.Context, id dsec.SandboxID, exec string) (process.Process, error) {
	const op = "find command in sandbox"
	sb, err := r.boxes.Live(op, id)
	if err != nil {
		return nil, err
	}
	if err := r.bringBack(ctx, sb); err != nil {
		return nil, err
	}
	p, err := r.findCommand(ctx, sb, exec)
	if err != nil {
		return nil, r.explain(op, sb, err)
	}
	return r.commandOf(sb, p), nil
}

func (r *Runtime) findCommand(ctx context.Context, sb *sandbox, exec string) (process.Process, error) {
	ctx, cancel := context.WithTimeout(ctx, greetTime)
	defer cancel()
	c, err := r.session(ctx, sb)
	if err != nil {
		return nil, err
	}
	return c.Process(ctx, exec)
}

// execs are the ids of a sandbox's commands.
func (r *Runtime) execs(ctx context.Context, sb *sandbox) []string {
	if rec := sb.record(); rec != nil && sb.isSuspended() {
		return rec.Execs
	}
	c, err := r.session(ctx, sb)
	if err != nil {
		return nil // it ends, or its guest breaks: there is nobody who knows any
	}
	ids, err := c.List(ctx)
	if err != nil {
		r.log.Warn("list commands of a sandbox", "sandbox", sb.ID, "err", err)
	}
	return ids
}

// commandOf is one in a guest, which a guest that is reached again, or that was suspended and goes on, has still.
func (r *Runtime) commandOf(sb *sandbox, p process.Process) process.Process {
	return &tier.SessionCommand{Process: p, Box: &sb.Box,
		Find:    func(ctx context.Context) (process.Process, error) { return r.findCommand(ctx, sb, p.Spec().ID) },
		Explain: func(err error) error { return r.explain("reach command in sandbox", sb, err) },
		Ready:   func(ctx context.Context) error { return r.bringBack(ctx, sb) },
		Awake:   sb.awake}
}

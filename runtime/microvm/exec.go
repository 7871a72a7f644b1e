package microvm

import (
	"context"
	"errors"
	"path"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/confine"
	"github.com/opendsec/dsec/guest"
	"github.com/opendsec/dsec/process"
)

// startLimit is how long the start of a command may take.
const startLimit = 45 * time.Second

// Exec starts a command. A context that ends while it starts does not stop it.
func (r *Runtime) Exec(ctx context.Context, id dsec.SandboxID, s process.Spec) (process.Process, error) {
	const op = "exec in sandbox"
	sb, err := r.live(op, id)
	if err != nil {
		return nil, err
	}
	if s.ID == "" {
		s.ID = dsec.Random(20)
	}
	if sb.isPaused() {
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
		return nil, dsec.Errorf(dsec.Invalid, "exec in sandbox", string(sb.id), "no program")
	}
	if s.Cwd != "" && !path.IsAbs(s.Cwd) {
		return nil, dsec.Errorf(dsec.Invalid, "exec in sandbox", string(sb.id), "working directory %s is not absolute", dsec.Quote(s.Cwd))
	}
	c, err := r.session(ctx, sb)
	if err != nil {
		return nil, err
	}
	spec := sb.record().Request.Spec
	profile, err := confine.ParseProfile(spec.Profile)
	if err != nil {
		return nil, err
	}
	p, err := c.Exec(ctx, guest.Exec{Command: guest.NewCommand(s), Caps: capsOf(profile), NoNewPrivs: spec.NoNewPrivs, OOMScoreAdj: confine.OOMScoreAdj})
	if err != nil {
		return nil, err
	}
	r.watchCommand(sb, p)
	return &command{p, r, sb}, nil
}

// capsOf a profile but MKNOD, which in a container makes nothing that can be opened, and in
// a machine would.
func capsOf(p confine.Profile) uint64 {
	return uint64(confine.Capabilities(p)) &^ (1 << unix.CAP_MKNOD)
}

// Process finds a command that runs or waits for Release.
func (r *Runtime) Process(ctx context.Context, id dsec.SandboxID, exec string) (process.Process, error) {
	const op = "find command in sandbox"
	sb, err := r.live(op, id)
	if err != nil {
		return nil, err
	}
	c, err := r.session(ctx, sb)
	if err != nil {
		return nil, err
	}
	p, err := c.Process(ctx, exec)
	if err != nil {
		return nil, r.explain(op, sb, err)
	}
	return &command{p, r, sb}, nil
}

// execs are the ids of a sandbox's commands.
func (r *Runtime) execs(ctx context.Context, sb *sandbox) []string {
	ctx, cancel := context.WithTimeout(ctx, greetTime)
	defer cancel()
	c, err := r.session(ctx, sb)
	if err != nil {
		return nil // it ends, or its guest breaks: there is nobody who knows any
	}
	ids, err := c.List(ctx)
	if err != nil {
		r.log.Warn("list commands of a sandbox", "sandbox", sb.id, "err", err)
	}
	return ids
}

// command is one in a guest whose errors say when it is its sandbox that is gone.
type command struct {
	process.Process
	r  *Runtime
	sb *sandbox
}

func (c *command) translate(err error) error {
	return c.r.explain("reach command in sandbox", c.sb, err)
}

func (c *command) Follow(ctx context.Context, s process.Stream, offset int64) (process.Reader, error) {
	r, err := c.Process.Follow(ctx, s, offset)
	if err != nil {
		return nil, c.translate(err)
	}
	return &reader{r, c}, nil
}

// reader says when it is its sandbox that is gone.
type reader struct {
	process.Reader
	c *command
}

func (r *reader) Next(ctx context.Context) (process.Chunk, error) {
	chunk, err := r.Reader.Next(ctx)
	return chunk, r.c.translate(err)
}

func (c *command) Kept(ctx context.Context, s process.Stream) (head, tail []byte, tailOffset int64, err error) {
	head, tail, tailOffset, err = c.Process.Kept(ctx, s)
	return head, tail, tailOffset, c.translate(err)
}

func (c *command) Write(ctx context.Context, p []byte) (int, error) {
	n, err := c.Process.Write(ctx, p)
	return n, c.translate(err)
}

func (c *command) CloseStdin(ctx context.Context) error {
	return c.translate(c.Process.CloseStdin(ctx))
}

func (c *command) Resize(ctx context.Context, s process.Size) error {
	return c.translate(c.Process.Resize(ctx, s))
}

func (c *command) Signal(ctx context.Context, sig int) error {
	return c.translate(c.Process.Signal(ctx, sig))
}

// Kill of what is gone with its sandbox has nothing left to do.
func (c *command) Kill(ctx context.Context) error {
	return unlessGone(c.translate(c.Process.Kill(ctx)))
}

// Release likewise.
func (c *command) Release(ctx context.Context) error {
	return unlessGone(c.translate(c.Process.Release(ctx)))
}

func unlessGone(err error) error {
	if errors.Is(err, dsec.SandboxGone.Err()) {
		return nil
	}
	return err
}

// Wait reports the end of a command whose sandbox is being removed as the end of the sandbox.
func (c *command) Wait(ctx context.Context) (process.Result, error) {
	res, err := c.Process.Wait(ctx)
	if p := c.sb.getPhase(); err == nil && res.Status == process.Killed && (p == removing || p == absent) {
		return res, dsec.Errorf(dsec.SandboxGone, "wait for command in sandbox", string(c.sb.id), "the sandbox ended during the call")
	}
	return res, c.translate(err)
}

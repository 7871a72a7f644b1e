package microvm

import (
	"context"
	"errors"
	"path"
	"sync"
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
	return &command{Process: p, r: r, sb: sb}, nil
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
	return &command{Process: p, r: r, sb: sb}, nil
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

// command is one in a guest. It outlives the session that it was started by: a guest that is
// reached again, or that was suspended and goes on, has it still.
type command struct {
	process.Process // its Spec, and the first session's

	r  *Runtime
	sb *sandbox

	mu  sync.Mutex
	now process.Process // of the last session; nil: the first
}

func (c *command) translate(err error) error {
	return c.r.explain("reach command in sandbox", c.sb, err)
}

// ask is do of what brings a suspended sandbox back.
func (c *command) ask(ctx context.Context, fn func(process.Process) error) error {
	if err := c.r.bringBack(ctx, c.sb); err != nil {
		return err
	}
	return c.do(ctx, fn)
}

// do calls fn with the command of the present session, and again with that of the next one if
// the session broke. A suspended sandbox is waited for.
func (c *command) do(ctx context.Context, fn func(process.Process) error) error {
	for again := 0; ; again++ {
		c.mu.Lock()
		p := c.now
		c.mu.Unlock()
		if p == nil {
			p = c.Process
		}
		err := fn(p)
		if dsec.ClassOf(err) != dsec.Unavailable || again == mostBroken || c.sb.GetPhase() != tier.Running {
			return c.translate(err)
		}
		if werr := c.sb.awake(ctx); werr != nil {
			return werr
		}
		next, ferr := c.r.findCommand(ctx, c.sb, c.Spec().ID)
		if ferr != nil {
			return c.translate(err)
		}
		c.mu.Lock()
		c.now = next
		c.mu.Unlock()
	}
}

func (c *command) Follow(ctx context.Context, s process.Stream, offset int64) (process.Reader, error) {
	r := &reader{c: c, stream: s, offset: offset}
	if err := r.open(ctx); err != nil {
		return nil, err
	}
	return r, nil
}

// reader goes on where it was when its session broke, and says when it is its sandbox that is gone.
type reader struct {
	c      *command
	stream process.Stream
	offset int64 // of the next byte

	mu  sync.Mutex
	now process.Reader
}

func (r *reader) open(ctx context.Context) error {
	return r.c.do(ctx, func(p process.Process) error {
		next, err := p.Follow(ctx, r.stream, r.offset)
		if err == nil {
			r.mu.Lock()
			r.now = next
			r.mu.Unlock()
		}
		return err
	})
}

func (r *reader) Next(ctx context.Context) (process.Chunk, error) {
	for again := 0; ; again++ {
		r.mu.Lock()
		now := r.now
		r.mu.Unlock()
		chunk, err := now.Next(ctx)
		if err == nil {
			r.offset = chunk.Offset + int64(len(chunk.Data))
			return chunk, nil
		}
		if dsec.ClassOf(err) != dsec.Unavailable || again == mostBroken || r.c.sb.GetPhase() != tier.Running {
			return chunk, r.c.translate(err)
		}
		_ = now.Close()
		if oerr := r.open(ctx); oerr != nil {
			return chunk, oerr
		}
	}
}

func (r *reader) Close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.now.Close()
}

func (c *command) Kept(ctx context.Context, s process.Stream) (head, tail []byte, tailOffset int64, err error) {
	err = c.ask(ctx, func(p process.Process) (err error) {
		head, tail, tailOffset, err = p.Kept(ctx, s)
		return err
	})
	return head, tail, tailOffset, err
}

// Write is not made again when its session breaks: nobody knows how much of it was read.
func (c *command) Write(ctx context.Context, b []byte) (int, error) {
	if err := c.r.bringBack(ctx, c.sb); err != nil {
		return 0, err
	}
	p, err := c.r.findCommand(ctx, c.sb, c.Spec().ID)
	if err != nil {
		return 0, c.translate(err)
	}
	n, err := p.Write(ctx, b)
	return n, c.translate(err)
}

func (c *command) CloseStdin(ctx context.Context) error {
	return c.ask(ctx, func(p process.Process) error { return p.CloseStdin(ctx) })
}

func (c *command) Resize(ctx context.Context, s process.Size) error {
	return c.ask(ctx, func(p process.Process) error { return p.Resize(ctx, s) })
}

func (c *command) Signal(ctx context.Context, sig int) error {
	return c.ask(ctx, func(p process.Process) error { return p.Signal(ctx, sig) })
}

// Kill of what is gone with its sandbox has nothing left to do.
func (c *command) Kill(ctx context.Context) error {
	return unlessGone(c.ask(ctx, func(p process.Process) error { return p.Kill(ctx) }))
}

// Release likewise.
func (c *command) Release(ctx context.Context) error {
	return unlessGone(c.ask(ctx, func(p process.Process) error { return p.Release(ctx) }))
}

func unlessGone(err error) error {
	if errors.Is(err, dsec.SandboxGone.Err()) {
		return nil
	}
	return err
}

// Wait reports the end of a command whose sandbox is being removed as the end of the sandbox.
func (c *command) Wait(ctx context.Context) (res process.Result, err error) {
	err = c.do(ctx, func(p process.Process) (err error) {
		res, err = p.Wait(ctx)
		return err
	})
	if p := c.sb.GetPhase(); err == nil && res.Status == process.Killed && (p == tier.Removing || p == tier.Absent) {
		return res, dsec.Errorf(dsec.SandboxGone, "wait for command in sandbox", string(c.sb.ID), "the sandbox ended during the call")
	}
	return res, err
}

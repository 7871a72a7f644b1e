package tier

import (
	"context"
	"errors"
	"sync"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/process"
)

// MostBroken is how many sessions with a guest a call survives that breaks each time.
const MostBroken = 3

// SessionCommand is a command in a guest. It outlives the session that it was started by: the next
// one may have it still, and so may a guest that was put away and goes on.
type SessionCommand struct {
	process.Process // its Spec, and the first session's
	Box             *Box
	// Find is the command in the session that there is now.
	Find func(context.Context) (process.Process, error)
	// Explain says of an error when it is the sandbox that is gone.
	Explain func(error) error
	// Ready is called before what has its sandbox run, Awake before another session is looked for.
	// nil: there is nothing to wait for.
	Ready, Awake func(context.Context) error
	// Forgets says that another session may be with an agent that knows nothing of it, which is told
	// as NotFound then, and not as the session that broke.
	Forgets bool

	mu  sync.Mutex
	now process.Process // of the last session; nil: the first
}

func call(f func(context.Context) error, ctx context.Context) error {
	if f == nil {
		return nil
	}
	return f(ctx)
}

// ask is do of what has the sandbox run.
func (c *SessionCommand) ask(ctx context.Context, fn func(process.Process) error) error {
	if err := call(c.Ready, ctx); err != nil {
		return err
	}
	return c.do(ctx, fn)
}

// over reports whether an error is not to be met by another session.
func (c *SessionCommand) over(err error, again int) bool {
	return dsec.ClassOf(err) != dsec.Unavailable || again == MostBroken || c.Box.GetPhase() != Running
}

// do calls fn with the command of the present session, and again with that of the next one if
// the session broke.
func (c *SessionCommand) do(ctx context.Context, fn func(process.Process) error) error {
	for again := 0; ; again++ {
		c.mu.Lock()
		p := c.now
		c.mu.Unlock()
		if p == nil {
			p = c.Process
		}
		err := fn(p)
		if c.over(err, again) {
			return c.Explain(err)
		}
		if err := call(c.Awake, ctx); err != nil {
			return err
		}
		next, ferr := c.Find(ctx)
		if ferr != nil {
			if c.Forgets && dsec.ClassOf(ferr) == dsec.NotFound {
				err = ferr
			}
			return c.Explain(err)
		}
		c.mu.Lock()
		c.now = next
		c.mu.Unlock()
	}
}

// once calls fn with the command of the present session, and not again when that breaks.
func (c *SessionCommand) once(ctx context.Context, fn func(process.Process) error) error {
	if err := call(c.Ready, ctx); err != nil {
		return err
	}
	p, err := c.Find(ctx)
	if err == nil {
		err = fn(p)
	}
	return c.Explain(err)
}

// Follow is process.Process's.
func (c *SessionCommand) Follow(ctx context.Context, s process.Stream, offset int64) (process.Reader, error) {
	r := &sessionReader{c: c, stream: s, offset: offset}
	if err := r.open(ctx); err != nil {
		return nil, err
	}
	return r, nil
}

// Kept is process.Process's.
func (c *SessionCommand) Kept(ctx context.Context, s process.Stream) (head, tail []byte, tailOffset int64, err error) {
	err = c.ask(ctx, func(p process.Process) (err error) {
		head, tail, tailOffset, err = p.Kept(ctx, s)
		return err
	})
	return head, tail, tailOffset, err
}

// Write is not made again when its session breaks: nobody knows how much of it was read.
func (c *SessionCommand) Write(ctx context.Context, b []byte) (n int, err error) {
	err = c.once(ctx, func(p process.Process) (err error) {
		n, err = p.Write(ctx, b)
		return err
	})
	return n, err
}

// CloseStdin is process.Process's.
func (c *SessionCommand) CloseStdin(ctx context.Context) error {
	return c.ask(ctx, func(p process.Process) error { return p.CloseStdin(ctx) })
}

// Resize is process.Process's.
func (c *SessionCommand) Resize(ctx context.Context, s process.Size) error {
	return c.ask(ctx, func(p process.Process) error { return p.Resize(ctx, s) })
}

// Signal is not sent again when its session breaks: a second one says more than the first.
func (c *SessionCommand) Signal(ctx context.Context, sig int) error {
	return c.once(ctx, func(p process.Process) error { return p.Signal(ctx, sig) })
}

// Kill of what is gone with its sandbox has nothing left to do.
func (c *SessionCommand) Kill(ctx context.Context) error {
	return unlessGone(c.ask(ctx, func(p process.Process) error { return p.Kill(ctx) }))
}

// Release likewise.
func (c *SessionCommand) Release(ctx context.Context) error {
	return unlessGone(c.ask(ctx, func(p process.Process) error { return p.Release(ctx) }))
}

func unlessGone(err error) error {
	if errors.Is(err, dsec.SandboxGone.Err()) {
		return nil
	}
	return err
}

// Wait reports the end of a command whose sandbox is being removed as the end of the sandbox.
func (c *SessionCommand) Wait(ctx context.Context) (res process.Result, err error) {
	err = c.do(ctx, func(p process.Process) (err error) {
		res, err = p.Wait(ctx)
		return err
	})
	if err == nil && res.Status == process.Killed && c.Box.Gone() {
		return res, dsec.Errorf(dsec.SandboxGone, "wait for command in sandbox", string(c.Box.ID), "the sandbox ended during the call")
	}
	return res, err
}

// sessionReader goes on where it was when its session broke.
type sessionReader struct {
	c      *SessionCommand
	stream process.Stream
	offset int64 // of the next byte

	mu  sync.Mutex
	now process.Reader
}

func (r *sessionReader) open(ctx context.Context) error {
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

// Next is process.Reader's.
func (r *sessionReader) Next(ctx context.Context) (process.Chunk, error) {
	for again := 0; ; again++ {
		r.mu.Lock()
		now := r.now
		r.mu.Unlock()
		chunk, err := now.Next(ctx)
		if err == nil {
			r.offset = chunk.Offset + int64(len(chunk.Data))
			return chunk, nil
		}
		if r.c.over(err, again) {
			return chunk, r.c.Explain(err)
		}
		_ = now.Close()
		if oerr := r.open(ctx); oerr != nil {
			return chunk, oerr
		}
	}
}

// Close is process.Reader's.
func (r *sessionReader) Close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.now.Close()
}

package fullvm

import (
	"context"
	"sync"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/process"
	"github.com/opendsec/dsec/runtime/tier"
)

// mostBroken is how many sessions a call survives that breaks each time.
const mostBroken = 3

// execution is a command of a sandbox. It outlives the session that it was started by: the next one may have it
// still. A guest that does not answer because its sandbox has ended is a sandbox that is gone.
type execution struct {
	process.Process // its Spec, and the first session's

	r  *Runtime
	sb *sandbox

	mu  sync.Mutex
	now process.Process // of the last session
}

func newExecution(r *Runtime, sb *sandbox, p process.Process) *execution {
	return &execution{Process: p, r: r, sb: sb, now: p}
}

func (e *execution) translate(err error) error {
	return e.sb.translate("reach command in sandbox", err)
}

// do calls fn with the command of the present session, and again with that of the next one if the session broke.
func (e *execution) do(ctx context.Context, fn func(process.Process) error) error {
	for again := 0; ; again++ {
		e.mu.Lock()
		p := e.now
		e.mu.Unlock()
		err := fn(p)
		if dsec.ClassOf(err) != dsec.Unavailable || again == mostBroken || e.sb.GetPhase() != tier.Running {
			return e.translate(err)
		}
		next, ferr := e.found(ctx)
		switch dsec.ClassOf(ferr) {
		case "":
		case dsec.NotFound: // it went with the agent that it was of
			return e.translate(ferr)
		default:
			return e.translate(err)
		}
		e.mu.Lock()
		e.now = next
		e.mu.Unlock()
	}
}

// found is the command in the session that there is now.
func (e *execution) found(ctx context.Context) (process.Process, error) {
	_, c, err := e.r.agent(ctx, "find command", e.sb.ID)
	if err != nil {
		return nil, err
	}
	return c.Process(ctx, e.Spec().ID)
}

// Follow is process.Process's.
func (e *execution) Follow(ctx context.Context, s process.Stream, offset int64) (process.Reader, error) {
	r := &reader{e: e, stream: s, offset: offset}
	if err := r.open(ctx); err != nil {
		return nil, err
	}
	return r, nil
}

// reader goes on where it was when its session broke.
type reader struct {
	e      *execution
	stream process.Stream
	offset int64 // of the next byte

	mu  sync.Mutex
	now process.Reader
}

func (r *reader) open(ctx context.Context) error {
	return r.e.do(ctx, func(p process.Process) error {
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
		if dsec.ClassOf(err) != dsec.Unavailable || again == mostBroken || r.e.sb.GetPhase() != tier.Running {
			return chunk, r.e.translate(err)
		}
		_ = now.Close()
		if oerr := r.open(ctx); oerr != nil {
			return chunk, oerr
		}
	}
}

// Close is process.Reader's.
func (r *reader) Close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.now.Close()
}

// Kept is process.Process's.
func (e *execution) Kept(ctx context.Context, s process.Stream) (head, tail []byte, tailOffset int64, err error) {
	err = e.do(ctx, func(p process.Process) (err error) {
		head, tail, tailOffset, err = p.Kept(ctx, s)
		return err
	})
	return head, tail, tailOffset, err
}

// Write is not made again when its session breaks: nobody knows how much of it was read.
func (e *execution) Write(ctx context.Context, b []byte) (int, error) {
	p, err := e.found(ctx)
	if err != nil {
		return 0, e.translate(err)
	}
	n, err := p.Write(ctx, b)
	return n, e.translate(err)
}

// CloseStdin is process.Process's.
func (e *execution) CloseStdin(ctx context.Context) error {
	return e.do(ctx, func(p process.Process) error { return p.CloseStdin(ctx) })
}

// Resize is process.Process's.
func (e *execution) Resize(ctx context.Context, s process.Size) error {
	return e.do(ctx, func(p process.Process) error { return p.Resize(ctx, s) })
}

// Signal is not sent again when its session breaks: a second one says more than the first.
func (e *execution) Signal(ctx context.Context, sig int) error {
	p, err := e.found(ctx)
	if err == nil {
		err = p.Signal(ctx, sig)
	}
	return e.translate(err)
}

// Kill of what is gone with its sandbox has nothing left to do.
func (e *execution) Kill(ctx context.Context) error {
	return unlessGone(e.do(ctx, func(p process.Process) error { return p.Kill(ctx) }))
}

// Release likewise.
func (e *execution) Release(ctx context.Context) error {
	return unlessGone(e.do(ctx, func(p process.Process) error { return p.Release(ctx) }))
}

// Wait reports the end of a command whose sandbox is being removed as the end of the sandbox.
func (e *execution) Wait(ctx context.Context) (res process.Result, err error) {
	err = e.do(ctx, func(p process.Process) (err error) {
		res, err = p.Wait(ctx)
		return err
	})
	if err == nil && res.Status == process.Killed && e.sb.Gone() {
		return res, dsec.Errorf(dsec.SandboxGone, "wait for command in sandbox", string(e.sb.ID), "the sandbox ended during the call")
	}
	return res, err
}

package hold

import (
	"context"
	"errors"
	"os"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/process"
)

// command is a process.Process that a hold runs.
type command struct {
	c       *Client
	sandbox string
	spec    process.Spec
	end     *awaited
	group   uint64

	released atomic.Bool
	mu       sync.Mutex // one Write at a time
}

// command must come before the request that starts or finds it.
func (c *Client) command(sandbox string, s process.Spec) *command {
	return &command{c: c, sandbox: sandbox, spec: s, end: c.ends.expect(execName{sandbox, s.ID})}
}

func (p *command) name() execName { return execName{p.sandbox, p.spec.ID} }

// found takes what the hold answers about the command.
func (p *command) found(f frame, ok bool, err error) (process.Process, error) {
	var w wireExecInfo
	if err == nil {
		var files []*os.File
		files, err = finish(f, ok, &w)
		closeAll(files)
	}
	if err != nil {
		p.c.ends.drop(p.name(), p.end)
		return nil, err
	}
	if p.spec.Argv == nil { // it was searched for by its name
		p.spec = w.Spec.spec()
	}
	p.group = w.Group
	if w.Ended {
		p.c.ends.ended(p.name(), w.Result, nil)
	}
	return p, nil
}

func (p *command) ref() wireRef { return wireRef{Sandbox: p.sandbox, Exec: p.spec.ID} }

func (p *command) do(ctx context.Context, o op) error { return p.c.call(ctx, o, p.ref(), nil, nil) }

// Group is the number of its control group on the v2 tree, which may be gone; 0: not known.
func (p *command) Group() uint64 { return p.group }

func (p *command) Spec() process.Spec { return p.spec }

func (p *command) Follow(ctx context.Context, s process.Stream, offset int64) (process.Reader, error) {
	if out, ok := p.known(s); ok && offset >= 0 {
		return &knownReader{rest: out[min(offset, int64(len(out))):], at: offset}, nil
	}
	r := p.ref()
	r.Stream, r.Offset = s, offset
	f, err := p.c.oneFile(ctx, opFollow, r)
	if err != nil {
		return nil, err
	}
	conn, err := unixConn(f)
	if err != nil {
		return nil, err
	}
	var spool *os.File
	open := func() (_ *process.SpoolFile, err error) {
		if spool, err = p.spool(context.Background(), s); err != nil {
			return nil, err
		}
		return process.OpenSpool(spool), nil
	}
	return process.NewLazyReader(open, &remote{c: conn, pos: offset}, offset, func() { closeAll([]*os.File{spool}) }), nil
}

// known is all that a command wrote to a stream, if that came with its end.
func (p *command) known(s process.Stream) ([]byte, bool) {
	if p.released.Load() || !p.end.isDone() || s < process.Stdout || int(s) > len(p.end.kept) {
		return nil, false
	}
	return p.end.kept[s-1], true
}

// knownReader follows a stream that has ended.
type knownReader struct {
	rest []byte
	at   int64
}

func (r *knownReader) Next(ctx context.Context) (process.Chunk, error) {
	if err := ctx.Err(); err != nil {
		return process.Chunk{}, err
	}
	c := process.Chunk{Offset: r.at, Data: r.rest, EOF: true}
	r.at, r.rest = r.at+int64(len(r.rest)), nil
	return c, nil
}

func (r *knownReader) Close() error { return nil }

// spool opens the spool of a stream as it is now.
func (p *command) spool(ctx context.Context, s process.Stream) (*os.File, error) {
	r := p.ref()
	r.Stream = s
	return p.c.oneFile(ctx, opSpool, r)
}

func (p *command) Kept(ctx context.Context, s process.Stream) (head, tail []byte, tailOffset int64, err error) {
	if out, ok := p.known(s); ok {
		return out, nil, int64(len(out)), nil
	}
	f, err := p.spool(ctx, s)
	if err != nil {
		return nil, nil, 0, err
	}
	defer func() { _ = f.Close() }()
	return process.OpenSpool(f).Kept()
}

func (p *command) Write(ctx context.Context, b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	// Ours is closed after each Write: who closes stdin may hold another
	// command of the same exec, and the reader sees the end when all are closed.
	f, err := p.c.oneFile(ctx, opStdin, p.ref())
	if err != nil {
		return 0, err
	}
	defer func() { _ = f.Close() }()
	stop := context.AfterFunc(ctx, func() { _ = f.SetWriteDeadline(aLongTimeAgo) })
	defer stop()
	n, err := f.Write(b)
	switch {
	case err == nil:
		return n, nil
	case ctx.Err() != nil:
		return n, dsec.E(dsec.ClassOf(ctx.Err()), "write to exec", p.spec.ID, ctx.Err())
	case errors.Is(err, unix.EPIPE), errors.Is(err, unix.EIO):
		return n, dsec.Errorf(dsec.IllegalState, "write to exec", p.spec.ID, "it reads no more")
	}
	return n, dsec.E(dsec.Internal, "write to exec", p.spec.ID, err)
}

func (p *command) CloseStdin(ctx context.Context) error {
	return p.do(ctx, opCloseStdin)
}

func (p *command) Resize(ctx context.Context, s process.Size) error {
	r := p.ref()
	r.Size = s
	return p.c.call(ctx, opResize, r, nil, nil)
}

func (p *command) Signal(ctx context.Context, sig int) error {
	r := p.ref()
	r.Signal = sig
	return p.c.call(ctx, opSignal, r, nil, nil)
}

func (p *command) Kill(ctx context.Context) error { return p.do(ctx, opKill) }

func (p *command) Wait(ctx context.Context) (process.Result, error) {
	if p.released.Load() {
		return process.Result{}, dsec.E(dsec.NotFound, "find exec", dsec.Quote(p.spec.ID), nil)
	}
	return p.c.wait(ctx, p.end)
}

// Release of a command whose end has come is only told: nothing can go wrong.
func (p *command) Release(ctx context.Context) error {
	if p.c.ends.release(p.name(), p.end) {
		p.released.Store(true)
		return p.c.tell(ctx, opRelease, p.ref())
	}
	return p.do(ctx, opRelease)
}

package hold

import (
	"context"
	"errors"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/process"
)

// command is a process.Process that a hold runs.
type command struct {
	c       *Client
	sandbox string
	spec    process.Spec

	mu sync.Mutex // one Write at a time
}

func (p *command) ref() wireRef { return wireRef{Sandbox: p.sandbox, Exec: p.spec.ID} }

func (p *command) do(ctx context.Context, o op) error { return p.c.call(ctx, o, p.ref(), nil, nil) }

func (p *command) Spec() process.Spec { return p.spec }

func (p *command) Follow(ctx context.Context, s process.Stream, offset int64) (process.Reader, error) {
	r := p.ref()
	r.Stream, r.Offset = s, offset
	sock, err := p.c.oneFile(ctx, opFollow, r)
	if err != nil {
		return nil, err
	}
	conn, err := unixConn(sock)
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

// spool opens the spool of a stream as it is now.
func (p *command) spool(ctx context.Context, s process.Stream) (*os.File, error) {
	r := p.ref()
	r.Stream = s
	return p.c.oneFile(ctx, opSpool, r)
}

func (p *command) Kept(ctx context.Context, s process.Stream) (head, tail []byte, tailOffset int64, err error) {
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
	var w wireResult
	if err := p.c.call(ctx, opWait, p.ref(), nil, &w); err != nil {
		return process.Result{}, err
	}
	return w.Result, nil
}

func (p *command) Release(ctx context.Context) error {
	return p.do(ctx, opRelease)
}

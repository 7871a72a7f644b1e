package runtimetest

import (
	"context"
	"os"
	"syscall"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/process"
)

// Spec as it was started.
func (p *proc) Spec() process.Spec { return p.spec }

func (p *proc) spool(s process.Stream) (*process.SpoolWriter, *os.File, error) {
	select {
	case <-p.b.gone:
		return nil, nil, p.isGone("read output")
	default:
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case !p.kept:
		return nil, nil, dsec.E(dsec.NotFound, "read output", p.spec.ID, nil)
	case s == process.Stdout:
		return p.out, p.outFile, nil
	case s == process.Stderr && p.err != nil:
		return p.err, p.errFile, nil
	}
	return nil, nil, dsec.Errorf(dsec.Invalid, "read output", p.spec.ID, "no stream %d", s)
}

func (p *proc) isGone(op string) error {
	return dsec.E(dsec.SandboxGone, op, string(p.b.req.ID), nil)
}

// Follow reads a stream.
func (p *proc) Follow(_ context.Context, s process.Stream, offset int64) (process.Reader, error) {
	w, f, err := p.spool(s)
	if err != nil {
		return nil, err
	}
	c, err := w.Follow(offset)
	if err != nil {
		return nil, err
	}
	return &reader{Reader: process.NewReader(process.OpenSpool(f), c, offset, nil), p: p}, nil
}

// reader ends with its sandbox.
type reader struct {
	process.Reader
	p *proc
}

func (r *reader) Next(ctx context.Context) (process.Chunk, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := make(chan struct{})
	defer close(stop)
	go func() {
		select {
		case <-r.p.b.gone:
			cancel()
		case <-stop:
		}
	}()
	c, err := r.Reader.Next(ctx)
	if err != nil {
		select {
		case <-r.p.b.gone:
			return c, r.p.isGone("follow output")
		default:
		}
	}
	return c, err
}

// Kept reads what is kept.
func (p *proc) Kept(_ context.Context, s process.Stream) (head, tail []byte, tailOffset int64, err error) {
	_, f, err := p.spool(s)
	if err != nil {
		return nil, nil, 0, err
	}
	return process.OpenSpool(f).Kept()
}

// Write feeds stdin.
func (p *proc) Write(ctx context.Context, b []byte) (int, error) {
	select {
	case <-p.inClosed:
		return 0, dsec.Errorf(dsec.IllegalState, "write stdin", p.spec.ID, "stdin is closed")
	default:
	}
	if len(b) == 0 {
		return 0, nil
	}
	select {
	case p.in <- append([]byte(nil), b...):
		return len(b), nil
	case <-p.b.gone:
		return 0, p.isGone("write stdin")
	case <-p.done:
		return 0, dsec.Errorf(dsec.IllegalState, "write stdin", p.spec.ID, "the command has ended")
	case <-p.inClosed:
		return 0, dsec.Errorf(dsec.IllegalState, "write stdin", p.spec.ID, "stdin is closed")
	case <-ctx.Done():
		return 0, dsec.E(dsec.ClassOf(ctx.Err()), "write stdin", p.spec.ID, ctx.Err())
	}
}

// CloseStdin ends stdin.
func (p *proc) CloseStdin(context.Context) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.closed {
		p.closed = true
		close(p.inClosed)
	}
	return nil
}

// Resize changes the terminal.
func (p *proc) Resize(_ context.Context, s process.Size) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.spec.PTY == nil {
		return dsec.Errorf(dsec.IllegalState, "resize", p.spec.ID, "no terminal")
	}
	p.size = s
	return nil
}

// Signal reaches the main process.
func (p *proc) Signal(_ context.Context, sig int) error {
	select {
	case <-p.b.gone:
		return p.isGone("signal")
	default:
	}
	if p.ended() {
		return dsec.Errorf(dsec.IllegalState, "signal", p.spec.ID, "the command has ended")
	}
	if sig < 0 || sig > 64 {
		return dsec.Errorf(dsec.Invalid, "signal", p.spec.ID, "no signal %d", sig)
	}
	p.signal(syscall.Signal(sig))
	return nil
}

// Kill ends the tree.
func (p *proc) Kill(ctx context.Context) error {
	select {
	case <-p.b.gone:
		return p.isGone("kill")
	default:
	}
	p.kill(process.Killed)
	return nil
}

// Wait returns the result.
func (p *proc) Wait(ctx context.Context) (process.Result, error) {
	select {
	case <-p.done:
	case <-p.b.gone:
	case <-ctx.Done():
		return process.Result{}, dsec.E(dsec.ClassOf(ctx.Err()), "wait", p.spec.ID, ctx.Err())
	}
	select {
	case <-p.b.gone:
		return process.Result{}, p.isGone("wait")
	default:
		return p.res, nil
	}
}

// Release forgets.
func (p *proc) Release(context.Context) error {
	if !p.ended() {
		return dsec.Errorf(dsec.IllegalState, "release", p.spec.ID, "the command runs")
	}
	p.b.release(p)
	return nil
}

package gvisor

import (
	"context"
	"errors"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/process"
)

// command is a command of the hold's whose errors say when it is its sandbox
// that is gone.
type command struct {
	process.Process
	sb *sandbox
}

// translate makes "unknown command" of a removed sandbox SandboxGone.
func (c *command) translate(err error) error {
	if err == nil || !c.sb.gone() || (!errors.Is(err, dsec.NotFound.Err()) && !errors.Is(err, dsec.IllegalState.Err())) {
		return err
	}
	return dsec.E(dsec.SandboxGone, "reach command in sandbox", string(c.sb.id), err)
}

func (c *command) Follow(ctx context.Context, s process.Stream, offset int64) (process.Reader, error) {
	r, err := c.Process.Follow(ctx, s, offset)
	if err != nil {
		return nil, c.translate(err)
	}
	return r, nil
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
	err := c.translate(c.Process.Kill(ctx))
	if errors.Is(err, dsec.SandboxGone.Err()) {
		return nil
	}
	return err
}

// Wait reports the end of a command whose sandbox is being removed as the end
// of the sandbox.
func (c *command) Wait(ctx context.Context) (process.Result, error) {
	res, err := c.Process.Wait(ctx)
	if err == nil && res.Status == process.Killed && c.sb.gone() {
		return res, dsec.Errorf(dsec.SandboxGone, "wait for command in sandbox", string(c.sb.id), "the sandbox ended during the call")
	}
	return res, c.translate(err)
}

func (c *command) Release(ctx context.Context) error {
	err := c.translate(c.Process.Release(ctx))
	if errors.Is(err, dsec.SandboxGone.Err()) {
		return nil
	}
	return err
}

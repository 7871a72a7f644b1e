package tier

import (
	"context"
	"errors"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/process"
)

// Command is a command of a sandbox whose errors say when it is the sandbox that is gone,
// for tiers whose commands belong to a supervisor that only knows that it has none of the name.
type Command struct {
	process.Process
	Sandbox dsec.SandboxID
	Gone    func() bool // whether the sandbox is removed, or about to be
}

// Explain makes "unknown command" of a removed sandbox SandboxGone.
func (c *Command) Explain(err error) error {
	if err == nil || !c.Gone() || (!errors.Is(err, dsec.NotFound.Err()) && !errors.Is(err, dsec.IllegalState.Err())) {
		return err
	}
	return dsec.E(dsec.SandboxGone, "reach command in sandbox", string(c.Sandbox), err)
}

// Follow is process.Process's.
func (c *Command) Follow(ctx context.Context, s process.Stream, offset int64) (process.Reader, error) {
	r, err := c.Process.Follow(ctx, s, offset)
	if err != nil {
		return nil, c.Explain(err)
	}
	return r, nil
}

// Kept is process.Process's.
func (c *Command) Kept(ctx context.Context, s process.Stream) (head, tail []byte, tailOffset int64, err error) {
	head, tail, tailOffset, err = c.Process.Kept(ctx, s)
	return head, tail, tailOffset, c.Explain(err)
}

// Write is process.Process's.
func (c *Command) Write(ctx context.Context, p []byte) (int, error) {
	n, err := c.Process.Write(ctx, p)
	return n, c.Explain(err)
}

// CloseStdin is process.Process's.
func (c *Command) CloseStdin(ctx context.Context) error {
	return c.Explain(c.Process.CloseStdin(ctx))
}

// Resize is process.Process's.
func (c *Command) Resize(ctx context.Context, s process.Size) error {
	return c.Explain(c.Process.Resize(ctx, s))
}

// Signal is process.Process's.
func (c *Command) Signal(ctx context.Context, sig int) error {
	return c.Explain(c.Process.Signal(ctx, sig))
}

// Kill of what is gone with its sandbox has nothing left to do.
func (c *Command) Kill(ctx context.Context) error {
	return unlessGone(c.Explain(c.Process.Kill(ctx)))
}

// Wait reports the end of a command whose sandbox is being removed as the end of the sandbox.
func (c *Command) Wait(ctx context.Context) (process.Result, error) {
	res, err := c.Process.Wait(ctx)
	if err == nil && res.Status == process.Killed && c.Gone() {
		return res, dsec.Errorf(dsec.SandboxGone, "wait for command in sandbox", string(c.Sandbox), "the sandbox ended during the call")
	}
	return res, c.Explain(err)
}

// Release of what is gone with its sandbox has nothing left to do.
func (c *Command) Release(ctx context.Context) error {
	return unlessGone(c.Explain(c.Process.Release(ctx)))
}

package loader

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/layer"
)

func (c *Client) life(d layer.Digest) *life {
	c.mu.Lock()
	defer c.mu.Unlock()
	l := c.lives[d]
	if l == nil {
		l = &life{}
		c.lives[d] = l
	}
	return l
}

// accompany has brought what others read first of a layer that is mounted now,
// and sees what is read of it this time.
func (c *Client) accompany(d layer.Digest, now *life) {
	if c.c.Order != nil {
		if ranges := c.c.Order(c.ctx, d); len(ranges) > 0 {
			if err := c.Fetch(c.ctx, d, ranges); err != nil && dsec.ClassOf(err) != dsec.Canceled { // it was let go
				c.c.Log.Warn("fetch ahead", "layer", d, "err", err)
			}
		}
	}
	select {
	case <-time.After(c.c.Window):
		if c.life(d) == now { // not mounted again since
			c.Note(d)
		}
	case <-c.ctx.Done():
	}
}

// Note passes on what was read first of a layer that is served, once until
// nobody has it any more.
func (c *Client) Note(d layer.Digest) {
	if c.c.Read == nil {
		return
	}
	now := c.life(d)
	ranges, err := c.Trace(c.ctx, d)
	if err != nil {
		if dsec.ClassOf(err) != dsec.NotFound && c.ctx.Err() == nil {
			c.c.Log.Warn("read trace", "layer", d, "err", err)
		}
		return
	}
	c.mu.Lock()
	first := !now.noted && len(ranges) > 0
	now.noted = now.noted || first
	c.mu.Unlock()
	if first {
		c.c.Read(c.ctx, d, ranges)
	}
}

// Leave has the loader close the files of a layer whose mounts are dissolved, and
// waits for the last user of them, which the kernel lets go a little later.
func (c *Client) Leave(ctx context.Context, d layer.Digest) error {
	for {
		c.mu.Lock()
		ended := c.ended
		c.mu.Unlock()
		names, err := c.c.Keeper.Names(ctx, prefix+d.Hex()+"/")
		if err != nil {
			return err
		}
		if !slices.ContainsFunc(names, func(n string) bool { return strings.HasSuffix(n, devName) }) {
			return c.leave(ctx, d, names)
		}
		select {
		case <-ended:
		case <-ctx.Done():
			return dsec.E(dsec.ClassOf(ctx.Err()), "wait until nobody reads layer", string(d), ctx.Err())
		}
	}
}

// leave ends the sessions by events, which do not end by themselves: of a layer
// that has become whole the Keeper has none any more, the loader still has.
func (c *Client) leave(ctx context.Context, d layer.Digest, names []string) error {
	c.marking.Lock()
	defer c.marking.Unlock()
	served, err := c.Status(ctx)
	if err != nil {
		return err
	}
	whole := slices.ContainsFunc(served, func(s Status) bool { return s.Digest == d && s.Here == s.Chunks })
	if err := c.let(ctx, frame{Op: opLet, Digest: d, Events: true}); err != nil {
		return err
	}
	for _, n := range names {
		name, ok := strings.CutSuffix(n, dataName)
		if !ok {
			continue
		}
		if whole { // it may be that nobody has come to it: the loader tells so now
			if err := c.unmarkKept(ctx, n); err != nil {
				return err
			}
		}
		c.drop(ctx, name)
	}
	return nil
}

// endEvents ends a session by events. The file stays marked: if anybody reads it
// still, the loader does not know it and the read is an error.
func (c *Client) endEvents(ctx context.Context, name string, d layer.Digest) error {
	err := c.let(ctx, frame{Op: opLet, Digest: d, Session: name})
	if err == nil {
		c.drop(ctx, name)
	}
	return err
}

// let has the loader close the files of a layer; it is IllegalState if there is
// another session.
func (c *Client) let(ctx context.Context, f frame) error {
	if _, err := c.ask(ctx, f); err != nil {
		return err
	}
	c.mu.Lock()
	delete(c.lives, f.Digest)
	c.mu.Unlock()
	return nil
}

// forget drops a session whose last user is gone, and the layer with the last.
func (c *Client) forget(name string, d layer.Digest) {
	err := c.let(c.ctx, frame{Op: opLet, Digest: d})
	if err != nil && dsec.ClassOf(err) != dsec.IllegalState && c.ctx.Err() == nil {
		c.missing("let go of layer", "layer", d, "err", err)
	}
	c.drop(c.ctx, name)
	c.mu.Lock()
	defer c.mu.Unlock()
	close(c.ended)
	c.ended = make(chan struct{})
}

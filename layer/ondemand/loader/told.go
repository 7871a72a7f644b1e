package loader

import (
	"errors"
	"strings"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/within"
)

// againAfter is how long the client waits before it asks again for what its
// owner has not taken.
const againAfter = time.Second

// longAgo is how long before an agent connects something may have happened that
// it is told of.
const longAgo = 24 * time.Hour

// plausible is the time that the loader says, within what can be. Where it says
// none, the earliest is right for who asks who had the layer since.
func plausible(at, connected, now time.Time) time.Time {
	switch earliest := connected.Add(-longAgo); {
	case at.IsZero():
		return connected
	case at.After(now):
		return now
	case at.Before(earliest):
		return earliest
	}
	return at
}

func (c *Client) plausible(at time.Time) time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return plausible(at, c.since, time.Now())
}

// troubled has it noted who may be told of failed reads, and tells the loader
// whether it is.
func (c *Client) troubled(f *frame) {
	t := Trouble{Layer: f.Digest, Session: numberOf(f.Session), At: c.plausible(f.At), Err: f.err()}
	if t.Err == nil {
		t.Err = dsec.E(dsec.Internal, "read layer", string(f.Digest), errors.New("the loader does not say why it fails"))
	}
	answer := frame{Op: opNoted, Digest: f.Digest, Session: f.Session, Number: f.Number, Generation: f.Generation}
	if c.c.Failed != nil && !c.c.Failed(c.ctx, t) {
		answer.Number = 0
	}
	if _, err := c.ask(c.ctx, answer); err != nil && c.ctx.Err() == nil {
		c.c.Log.Warn("tell the loader whether a failed read is noted", "layer", f.Digest, "err", err)
	}
}

// sessionEnded drops a session when its end has been taken note of. Only then is
// its trace passed on, which may take a while.
func (c *Client) sessionEnded(f *frame) {
	if f.Digest == "" || !strings.HasPrefix(f.Session, prefix+f.Digest.Hex()+"/") { // what else is kept is not the loader's to end
		c.c.Log.Error("the loader tells of the end of what is no session", "layer", f.Digest, "session", f.Session)
		return
	}
	c.mu.Lock()
	again := c.ending[f.Session]
	c.ending[f.Session] = true
	c.mu.Unlock()
	if again { // another loader tells of it, too
		return
	}
	defer func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		delete(c.ending, f.Session)
	}()
	e := Ended{Layer: f.Digest, Session: numberOf(f.Session), At: c.plausible(f.At)}
	for c.c.Ended != nil && !c.c.Ended(c.ctx, e) {
		if within.Sleep(c.ctx, againAfter) != nil {
			return
		}
	}
	c.Note(f.Digest)
	c.forget(f.Session, f.Digest)
}

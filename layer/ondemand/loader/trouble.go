package loader

import (
	"context"
	"time"

	"github.com/opendsec/dsec/layer"
)

// noteWithin is how long a reader waits for the agent to have written down that
// its read failed, before it is told so. It is more than the next agent takes to
// come, and less than a reader waits for a store that is away.
const noteWithin = 10 * time.Second

// troubles are the failed reads of one layer, under Server.mu. The agent is told
// of them before their readers are: what a reader has done with the error may be
// over a moment later, and with it the sandbox. One message is on its way at a
// time, and speaks of all that have failed when it is sent; one that fails after
// that waits for the next, because its reader may be a sandbox that was not there
// before.
type troubles struct {
	count, sent, noted uint64    // failed reads: all, those of the message on its way, those written down
	why                error     // of the last one
	since              time.Time // none that is not noted failed before
	sentAt             time.Time
	changed            chan struct{} // closed, and made anew, when noted has changed
}

// failed returns when the agent has noted that a read failed, or will not soon:
// then the next one is told. It is no trouble if who reads has gone.
func (s *Server) failed(ctx context.Context, x *served, err error) {
	if err == nil || ctx.Err() != nil {
		return
	}
	s.mu.Lock()
	t := &x.trouble
	if t.changed == nil {
		t.changed = make(chan struct{})
	}
	if t.count == t.noted {
		t.since = time.Now()
	}
	t.count, t.why = t.count+1, err
	mine := t.count
	quiet := time.Since(x.said) < saidEvery
	if !quiet {
		x.said = time.Now()
	}
	s.mu.Unlock()
	if !quiet {
		s.opts.Log.Warn("a read of a layer failed", "layer", x.digest, "err", err)
	}
	s.tellTrouble(x)
	late := time.NewTimer(s.opts.NoteWithin)
	defer late.Stop()
	for {
		s.mu.Lock()
		done, changed := t.noted >= mine, t.changed
		s.mu.Unlock()
		if done {
			return
		}
		select {
		case <-changed:
		case <-late.C:
			s.opts.Log.Error("nobody has noted that a read of a layer failed", "layer", x.digest)
			return
		case <-ctx.Done():
			return
		case <-s.ctx.Done():
			return
		}
	}
}

const saidEvery = time.Second

// tellTrouble tells the agent of what it has not been told, unless a message is
// on its way.
func (s *Server) tellTrouble(x *served) {
	s.mu.Lock()
	t, c := &x.trouble, s.agent
	if c == nil || t.count == t.noted || t.sent > t.noted {
		s.mu.Unlock()
		return
	}
	t.sent, t.sentAt = t.count, time.Now()
	f := frame{Op: opTrouble, Digest: x.digest, Error: troubleOf(t.why), Number: t.sent, At: t.since}
	s.mu.Unlock()
	_ = c.send(f) // if it is gone the next one is told
}

// noted takes the word of the agent that failures up to a number are written down.
func (s *Server) noted(d layer.Digest, number uint64) {
	s.mu.Lock()
	x := s.layers[d]
	if x == nil || number <= x.trouble.noted || number > x.trouble.count {
		s.mu.Unlock()
		return
	}
	t := &x.trouble
	t.noted, t.since = number, t.sentAt // the others failed after that
	close(t.changed)
	t.changed = make(chan struct{})
	s.mu.Unlock()
	s.tellTrouble(x)
}

// tellAgain tells an agent that has just come what the one before it has not
// written down.
func (s *Server) tellAgain() {
	s.mu.Lock()
	var all []*served
	for _, x := range s.layers {
		x.trouble.sent = x.trouble.noted
		all = append(all, x)
	}
	s.mu.Unlock()
	for _, x := range all {
		s.tellTrouble(x)
	}
}

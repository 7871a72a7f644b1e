package loader

import (
	"context"
	"math/rand/v2"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/within"
	"github.com/opendsec/dsec/layer"
)

// noteWithin is how long a reader waits for the agent to have written down that
// its read failed, before it is told so. It is more than the next agent takes to
// come, and less than a reader waits for a store that is away.
const noteWithin = 10 * time.Second

// failing is where reads fail.
type failing struct {
	digest  layer.Digest
	session string // "": any of the layer
}

// troubles are the failed reads of one session that are not noted, under
// Server.mu. The agent is told of them before their readers are: what a reader has
// done with the error may be over a moment later, and with it the sandbox. One
// message is on its way at a time, and speaks of all that have failed when it is
// sent; one that fails after that waits for the next, because its reader may be a
// sandbox that was not there before. They outlive the layer: what is let go may
// have failed before.
type troubles struct {
	generation         uint64        // of the count: the agent may answer what another loader, or an earlier one of these, has told
	count, sent, noted uint64        // failed reads: all, those of the message on its way, those written down
	why                error         // of the last one, or of one that is worse
	since, behind      time.Time     // none failed before: of those not noted; of those behind the message on its way
	again              bool          // it is going to be sent again
	changed            chan struct{} // closed, and made anew, when noted has changed
}

// earliest of two times of which one may be none.
func earliest(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}

// worse says of an error that it is not only that something is away: the agent has
// to know of it whatever else fails beside it.
func worse(err error) bool {
	switch dsec.ClassOf(err) {
	case dsec.Corrupt, dsec.Internal:
		return true
	}
	return false
}

func (t *troubles) add(at time.Time, err error) {
	t.count++
	if t.why == nil || worse(err) || !worse(t.why) {
		t.why = err
	}
	if t.sent > t.noted {
		t.behind = earliest(t.behind, at)
	} else {
		t.since = earliest(t.since, at)
	}
}

// unsend takes back that a message is on its way.
func (t *troubles) unsend() {
	t.sent, t.since, t.behind = t.noted, earliest(t.since, t.behind), time.Time{}
}

// failed returns when the agent has noted that a read failed, or will not soon:
// then the next one is told. It is no trouble if who reads has gone.
func (s *Server) failed(ctx context.Context, x *served, session string, err error) {
	if err == nil || ctx.Err() != nil {
		return
	}
	t, mine := s.raise(x, session, time.Now(), err)
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
		case <-ctx.Done(): // the one who serves ends, or the reader has gone
			return
		}
	}
}

// raise tells the agent that a read failed, which is the returned one of those.
func (s *Server) raise(x *served, session string, at time.Time, err error) (t *troubles, mine uint64) {
	key := failing{x.digest, session}
	s.mu.Lock()
	if t = s.failing[key]; t == nil {
		t = &troubles{generation: rand.Uint64(), changed: make(chan struct{})}
		s.failing[key] = t
	}
	t.add(at, err)
	mine = t.count
	quiet := time.Since(x.said) < saidEvery
	if !quiet {
		x.said = time.Now()
	}
	s.tellTroubleLocked(key, t)
	s.mu.Unlock()
	if !quiet {
		s.opts.Log.Warn("a read of a layer failed", "layer", x.digest, "err", err)
	}
	return t, mine
}

const saidEvery = time.Second

// tellTroubleLocked tells the agent of what it has not been told, unless a message
// is on its way.
func (s *Server) tellTroubleLocked(key failing, t *troubles) {
	c := s.agent
	if c == nil || t.count == t.noted || t.sent > t.noted {
		return
	}
	t.sent = t.count
	f := frame{Op: opTrouble, Digest: key.digest, Session: key.session, Error: troubleOf(t.why), Number: t.sent, Generation: t.generation, At: t.since}
	s.work.Go(func() { // not by the reader, whose wait has an end
		if c.send(f) != nil {
			s.notTaken(key, &f)
		}
	})
}

// notTaken has a message sent again, a little later: to this agent or to the one
// that there is then.
func (s *Server) notTaken(key failing, f *frame) {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.failing[key]
	if t == nil || t.generation != f.Generation || t.sent == t.noted || t.again {
		return
	}
	t.again = true
	s.work.Go(func() {
		if within.Sleep(s.ctx, s.opts.NoteWithin/10) != nil {
			return
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		t.again = false
		t.unsend()
		s.tellTroubleLocked(key, t)
	})
}

// noted takes the word of the agent that failures up to a number are written down,
// or that they are not.
func (s *Server) noted(f *frame) {
	key := failing{f.Digest, f.Session}
	if f.Number == 0 {
		s.notTaken(key, f)
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.failing[key]
	if t == nil || t.generation != f.Generation || f.Number <= t.noted || f.Number > t.sent {
		return
	}
	t.noted, t.since, t.behind = f.Number, t.behind, time.Time{} // the others failed after that
	close(t.changed)
	t.changed = make(chan struct{})
	if t.count == t.noted {
		delete(s.failing, key)
		return
	}
	s.tellTroubleLocked(key, t)
}

// tellAgain tells an agent that has just come what the one before it has not
// written down.
func (s *Server) tellAgain() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for key, t := range s.failing {
		t.unsend()
		s.tellTroubleLocked(key, t)
	}
}

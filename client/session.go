package client

import (
	"context"
	"sync"
	"time"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/api/dsec/v1"
	"github.com/opendsec/dsec/api/wire"
	"github.com/opendsec/dsec/internal/within"
	"github.com/opendsec/dsec/process"
)

// Mode is what a session carries of an exec.
type Mode string

// The modes.
const (
	ModeExit   Mode = "exit"   // how it ended
	ModeKept   Mode = "kept"   // how it ended, with the kept output
	ModeStream Mode = "stream" // output as it comes, and how it ended
)

const defaultWindow = 256 << 10

// Events selects sandbox events; zero fields match all.
type Events struct {
	Sandboxes []dsec.SandboxID
	Labels    map[string]string
	Rollout   string
	Types     []dsec.EventType
	Since     time.Time // zero: from now
}

func (e *Events) message() *dsecv1.EventFilter {
	if e == nil {
		return nil
	}
	f := &dsecv1.EventFilter{Labels: e.Labels, RolloutKey: e.Rollout, Since: wire.Stamp(e.Since)}
	for _, id := range e.Sandboxes {
		f.Sandboxes = append(f.Sandboxes, string(id))
	}
	for _, t := range e.Types {
		f.Types = append(f.Types, string(t))
	}
	return f
}

// Session is one stream on which everything comes that a program waits for:
// ends and output of any number of execs, and sandbox events. It opens itself
// again when the connection breaks and goes on from the offsets it has.
type Session struct {
	c      *Client
	events *Events
	fn     func(dsec.Event)

	ctx    context.Context //nolint:containedctx // ends with Close
	cancel context.CancelCauseFunc
	wg     sync.WaitGroup
	wake   chan struct{} // holds one element while acks are pending

	mu     sync.Mutex
	id     string        // of the open stream; "" while there is none
	opened chan struct{} // closed while there is one
	execs  map[string]*Running
	acks   map[string]*dsecv1.ExecAck
	err    error         // why it ended
	last   time.Time     // of the last event; only of receive
	live   chan struct{} // closed when the events of the past have come, or it ended
	absent []dsec.NodeID // that could not be asked for theirs
	past   error         // why they did not come
}

// errClosed is why the execs of a closed session are not waited for any more.
var errClosed = dsec.Errorf(dsec.Canceled, "wait for exec", "", "the session was closed")

// OpenSession opens a session. With events, fn gets each; it must be quick,
// because nothing else is received meanwhile. Close ends it.
func (c *Client) OpenSession(ctx context.Context, events *Events, fn func(dsec.Event)) (*Session, error) {
	s := &Session{c: c, events: events, fn: fn, opened: make(chan struct{}), execs: map[string]*Running{},
		acks: map[string]*dsecv1.ExecAck{}, wake: make(chan struct{}, 1), live: make(chan struct{})}
	s.ctx, s.cancel = context.WithCancelCause(context.Background())
	s.wg.Go(s.run)
	s.wg.Go(s.acknowledge)
	if _, err := s.session(ctx); err != nil {
		_ = s.Close()
		return nil, err
	}
	return s, nil
}

// Close ends the session; its execs run on.
func (s *Session) Close() error {
	s.cancel(errClosed)
	s.wg.Wait()
	return nil
}

// session waits until a stream is open and returns its id.
func (s *Session) session(ctx context.Context) (string, error) {
	for {
		s.mu.Lock()
		id, opened, err := s.id, s.opened, s.err
		s.mu.Unlock()
		if err != nil {
			return "", err
		}
		if id != "" {
			return id, nil
		}
		select {
		case <-opened:
		case <-ctx.Done():
			return "", dsec.E(dsec.ClassOf(ctx.Err()), "open session", "", ctx.Err())
		}
	}
}

// run keeps a stream open until Close, or until it cannot be opened any more.
func (s *Session) run() {
	pause, tries := firstPause, 0
	for {
		opened, err := s.receive()
		if opened {
			pause, tries = firstPause, 0
		}
		tries++
		final := s.ctx.Err() != nil || dsec.ClassOf(err) != dsec.Unavailable || tries > s.c.retries
		if !final {
			final = within.Sleep(s.ctx, pause) != nil
			pause *= 4
		}
		if final {
			if cause := context.Cause(s.ctx); cause != nil {
				err = cause
			}
			s.finish(err)
			return
		}
	}
}

func (s *Session) finish(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.err = err
	close(s.opened)
	s.liveLocked(nil)
	for k, r := range s.execs {
		r.failLocked(err)
		delete(s.execs, k)
	}
}

// receive opens a stream and takes what comes until it breaks.
func (s *Session) receive() (opened bool, err error) {
	ctx, cancel := context.WithCancel(s.ctx)
	defer cancel()
	f := s.events.message()
	if f != nil && !s.last.IsZero() {
		f.Since = wire.Stamp(s.last)
	}
	quiet := s.c.newSilence(cancel)
	defer quiet.stop()
	stream, err := s.c.events.Open(ctx, &dsecv1.OpenRequest{Session: "c" + dsec.Random(30), Events: f})
	if err != nil {
		return false, quiet.blame("open session", "", wire.FromConnect("open session", err))
	}
	defer stream.Close()
	defer s.broken()
	for stream.Receive() {
		quiet.restart()
		m := stream.Msg()
		if h := m.GetHello(); h != nil {
			opened = true
			s.greeted(h.Session)
			continue
		}
		s.dispatch(m)
	}
	if err := stream.Err(); err != nil {
		return opened, quiet.blame("receive events", "", wire.FromConnect("receive events", err))
	}
	return opened, dsec.Errorf(dsec.Unavailable, "receive events", "", "the stream ended")
}

// greeted: a new stream is open; everything that is waited for is subscribed
// again from where it was.
func (s *Session) greeted(id string) {
	s.mu.Lock()
	s.id = id
	var again []*dsecv1.ExecSubscription
	for _, r := range s.execs {
		if r.started {
			again = append(again, r.subscriptionLocked())
		}
	}
	close(s.opened)
	s.mu.Unlock()
	if len(again) > 0 {
		s.wg.Go(func() { s.subscribe(id, again) })
	}
}

func (s *Session) broken() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.id != "" {
		s.id, s.opened = "", make(chan struct{})
	}
}

const subscribeAtOnce = 500

func (s *Session) subscribe(id string, list []*dsecv1.ExecSubscription) {
	for len(list) > 0 {
		n := min(len(list), subscribeAtOnce)
		err := s.c.retry(s.ctx, "subscribe", func() error {
			_, err := s.c.events.Subscribe(s.ctx, &dsecv1.SubscribeRequest{Session: id, Execs: list[:n]})
			return err
		})
		s.mu.Lock()
		current := s.id == id
		s.mu.Unlock()
		if !current {
			return // the next stream subscribes anew
		}
		for _, u := range list[:n] {
			if err != nil {
				s.failed(u.Sandbox, u.Exec, err)
			}
		}
		list = list[n:]
	}
}

func (s *Session) dispatch(m *dsecv1.Frame) {
	switch {
	case m.GetOutput() != nil:
		s.output(m.GetOutput())
	case m.GetEnded() != nil:
		s.ended(m.GetEnded())
	case m.GetEvent() != nil:
		e := wire.EventFrom(m.GetEvent())
		s.last = e.Time
		if s.fn != nil {
			s.fn(e)
		}
	case m.GetLive() != nil:
		s.mu.Lock()
		s.liveLocked(m.GetLive().Absent)
		s.mu.Unlock()
	case m.GetError() != nil && m.GetError().Exec != "":
		e := m.GetError()
		s.failed(e.Sandbox, e.Exec, wire.Err(e.Error))
	}
}

// failed ends an exec, or subscribes it again if its node was away.
func (s *Session) failed(sandbox, exec string, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	k := wire.ExecKey(sandbox, exec)
	r := s.execs[k]
	if r == nil || r.finished {
		return
	}
	if r.tries++; dsec.ClassOf(err) != dsec.Unavailable || r.tries > s.c.retries || s.err != nil {
		r.failLocked(err)
		delete(s.execs, k)
		return
	}
	id, pause := s.id, firstPause<<(2*r.tries)
	s.wg.Go(func() {
		if within.Sleep(s.ctx, pause) != nil {
			return
		}
		s.mu.Lock()
		u := r.subscriptionLocked()
		s.mu.Unlock()
		s.subscribe(id, []*dsecv1.ExecSubscription{u})
	})
}

// acknowledge sends what readers consumed, many at a time.
func (s *Session) acknowledge() {
	for {
		select {
		case <-s.ctx.Done():
			return
		case <-s.wake:
		}
		s.mu.Lock()
		req := &dsecv1.AckRequest{Session: s.id}
		for _, a := range s.acks {
			req.Acks = append(req.Acks, a)
		}
		s.acks = map[string]*dsecv1.ExecAck{}
		s.mu.Unlock()
		if req.Session != "" {
			_, _ = s.c.events.Ack(s.ctx, req) // a broken stream subscribes anew, with these offsets
		}
	}
}

// Exec starts a command whose end, and in ModeStream whose output, the session
// carries. fn gets output in order from one goroutine; while it blocks, that
// command is slowed down and no other.
func (s *Session) Exec(ctx context.Context, id dsec.SandboxID, spec process.Spec, mode Mode, fn func(Chunk) error) (*Running, error) {
	if spec.ID == "" {
		spec.ID = newKey()
	}
	r := newRunning(s, s.c.Attach(id, spec.ID), mode, fn)
	k := wire.ExecKey(string(id), spec.ID)
	s.mu.Lock()
	if s.err != nil {
		s.mu.Unlock()
		return nil, s.err
	}
	s.execs[k] = r
	s.mu.Unlock()
	err := s.startIn(ctx, r, spec)
	if err != nil {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.execs, k)
		r.failLocked(err)
		return nil, err
	}
	return r, nil
}

// startIn starts with the session that is open; if it broke meanwhile the call
// is repeated with the next one, and finds the same exec.
func (s *Session) startIn(ctx context.Context, r *Running, spec process.Spec) error {
	for try := 0; ; try++ {
		id, err := s.session(ctx)
		if err != nil {
			return err
		}
		_, err = s.c.start(ctx, r.Sandbox, spec, &dsecv1.Subscription{Session: id, Mode: string(r.mode), Window: defaultWindow})
		s.mu.Lock()
		same := s.id == id
		r.started = err == nil && same // from now on each new stream subscribes it
		s.mu.Unlock()
		if err == nil && same || err != nil && (same || try >= s.c.retries) {
			return err
		}
	}
}

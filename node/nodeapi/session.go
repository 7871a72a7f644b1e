package nodeapi

import (
	"context"
	"net/http"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/api/dsec/v1"
	"github.com/opendsec/dsec/api/wire"
	"github.com/opendsec/dsec/internal/crew"
	"github.com/opendsec/dsec/node"
	"github.com/opendsec/dsec/process"
)

const (
	defaultWindow = 256 << 10
	maxWindow     = 16 << 20
	maxSubs       = 10_000 // execs of one session on this node
)

// sessions are the open event streams, by id.
type sessions struct {
	mu   sync.Mutex
	open map[string]*session
}

// session carries what a gateway subscribed for one of its clients.
type session struct {
	id  string
	who caller
	s   *Server
	ctx context.Context //nolint:containedctx // the life of the stream

	send func(proto.Message) error
	crew crew.Crew

	mu   sync.Mutex
	subs map[string]*subscription // by sandbox and exec
}

// subscription is one exec of a session.
type subscription struct {
	cancel context.CancelFunc
	credit map[process.Stream]*credit // nil unless output is streamed
}

func (x *sessions) find(id string, who caller) (*session, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	ses := x.open[id]
	if ses == nil || ses.who != who {
		return nil, dsec.Errorf(dsec.NotFound, "find session", dsec.Quote(id), "no such session is open")
	}
	return ses, nil
}

func (s *Server) serveSession(w http.ResponseWriter, r *http.Request) {
	s.raw(func(w http.ResponseWriter, r *http.Request) error {
		req := &dsecv1.NodeSession{}
		if err := request(w, r, req); err != nil {
			return err
		}
		if !wire.SessionID(req.Session) {
			return dsec.Errorf(dsec.Invalid, "open session", dsec.Quote(req.Session), "not the id of a session")
		}
		return s.push(w, r, func(ctx context.Context, send func(proto.Message) error) error {
			return s.runSession(ctx, who(r), req, send)
		})
	})(w, r)
}

// runSession lasts as long as the stream does.
func (s *Server) runSession(ctx context.Context, who caller, req *dsecv1.NodeSession, send func(proto.Message) error) error {
	ses := &session{id: req.Session, who: who, s: s, ctx: ctx, send: send, subs: map[string]*subscription{}}
	s.sessions.mu.Lock()
	if s.sessions.open[ses.id] != nil {
		s.sessions.mu.Unlock()
		return dsec.Errorf(dsec.AlreadyExists, "open session", ses.id, "is open")
	}
	s.sessions.open[ses.id] = ses
	s.sessions.mu.Unlock()
	defer ses.close()
	now := time.Now() // what happens after hello is not missed
	if err := send(&dsecv1.Frame{Item: &dsecv1.Frame_Hello{Hello: &dsecv1.Hello{Session: ses.id}}}); err != nil {
		return err
	}
	if req.Events == nil {
		<-ctx.Done()
		return context.Cause(ctx)
	}
	return s.forward(ctx, who, req.Events, now, send)
}

// forward sends the events a filter selects, with a mark after those of the past.
func (s *Server) forward(ctx context.Context, who caller, f *dsecv1.EventFilter, now time.Time, send func(proto.Message) error) error {
	since := wire.Instant(f.Since)
	if since.IsZero() {
		since = now
	}
	sandboxes, types := set(f.Sandboxes), set(f.Types)
	nf := node.Filter{Project: who.project, Labels: f.Labels, Rollout: f.RolloutKey, All: true}
	return s.cfg.Watcher.Events(ctx, nf, since, func(e dsec.Event) error {
		if len(sandboxes) > 0 && !sandboxes[string(e.Sandbox)] || len(types) > 0 && !types[string(e.Type)] {
			return nil
		}
		return send(&dsecv1.Frame{Item: &dsecv1.Frame_Event{Event: wire.Event(e)}})
	}, func() error {
		return send(&dsecv1.Frame{Item: &dsecv1.Frame_Live{Live: &dsecv1.Live{}}})
	})
}

func set(list []string) map[string]bool {
	m := map[string]bool{}
	for _, s := range list {
		m[s] = true
	}
	return m
}

func (ses *session) close() {
	ses.s.sessions.mu.Lock()
	delete(ses.s.sessions.open, ses.id)
	ses.s.sessions.mu.Unlock()
	ses.crew.Close()
	ses.mu.Lock()
	for _, sub := range ses.subs {
		sub.cancel()
	}
	ses.mu.Unlock()
	ses.crew.Wait()
}

// subscriptions is the verb that changes what a session carries.
func (s *Server) subscriptions(ctx context.Context, who caller, req *dsecv1.MuxCall) (proto.Message, error) {
	ses, err := s.sessions.find(req.Session, who)
	if err != nil {
		return nil, err
	}
	for _, a := range req.Acks {
		ses.ack(a)
	}
	for _, n := range req.Unsubscribe {
		ses.unsubscribe(n)
	}
	for _, u := range req.Subscribe {
		id, p, err := s.process(ctx, who, u.Sandbox, u.Exec)
		if err != nil {
			ses.fail(u.Sandbox, u.Exec, err)
			continue
		}
		ses.subscribe(id, p, u)
	}
	return &dsecv1.SubscribeResponse{}, nil
}

func (ses *session) ack(a *dsecv1.ExecAck) {
	ses.mu.Lock()
	sub := ses.subs[wire.ExecKey(a.Sandbox, a.Exec)]
	ses.mu.Unlock()
	if sub != nil && sub.credit != nil {
		sub.credit[process.Stdout].ack(a.StdoutOffset)
		sub.credit[process.Stderr].ack(a.StderrOffset)
	}
}

func (ses *session) unsubscribe(n *dsecv1.ExecName) {
	ses.mu.Lock()
	defer ses.mu.Unlock()
	if sub := ses.subs[wire.ExecKey(n.Sandbox, n.Exec)]; sub != nil {
		sub.cancel()
		delete(ses.subs, wire.ExecKey(n.Sandbox, n.Exec))
	}
}

// fail reports that a subscription has ended; it does not wait.
func (ses *session) fail(sandbox, exec string, err error) {
	ses.crew.Go(func() {
		_ = ses.send(wire.SubscriptionError(sandbox, exec, ses.s.closing(err))) // the stream is over: nobody to tell
	})
}

// subscribe carries an exec from now on, instead of an older subscription to
// it.
func (ses *session) subscribe(id dsec.SandboxID, p process.Process, u *dsecv1.ExecSubscription) {
	if err := checkSubscription(u); err != nil {
		ses.fail(u.Sandbox, u.Exec, err)
		return
	}
	ctx, cancel := context.WithCancel(ses.ctx)
	sub := &subscription{cancel: cancel}
	if u.Mode == "stream" {
		window := min(u.Window, maxWindow)
		if window == 0 {
			window = defaultWindow
		}
		sub.credit = map[process.Stream]*credit{process.Stdout: newCredit(u.StdoutOffset, window),
			process.Stderr: newCredit(u.StderrOffset, window)}
	}
	k := wire.ExecKey(u.Sandbox, u.Exec)
	ses.mu.Lock()
	defer ses.mu.Unlock()
	if old := ses.subs[k]; old != nil {
		old.cancel()
	}
	if len(ses.subs) >= maxSubs {
		cancel()
		ses.fail(u.Sandbox, u.Exec, dsec.Errorf(dsec.ResourceExhausted, "subscribe", u.Exec, "the session carries %d execs", maxSubs))
		return
	}
	ses.subs[k] = sub
	started := ses.crew.Go(func() {
		defer cancel()
		ses.carry(ctx, id, p, u, sub)
		ses.mu.Lock()
		defer ses.mu.Unlock()
		if ses.subs[k] == sub {
			delete(ses.subs, k)
		}
	})
	if !started {
		cancel()
	}
}

func checkSubscription(u *dsecv1.ExecSubscription) error {
	switch u.Mode {
	case "", "exit", "kept", "stream":
	default:
		return dsec.Errorf(dsec.Invalid, "subscribe", u.Exec, "unknown mode %s", dsec.Quote(u.Mode))
	}
	if u.StdoutOffset < 0 || u.StderrOffset < 0 || u.Window < 0 {
		return dsec.Errorf(dsec.Invalid, "subscribe", u.Exec, "offsets and window must not be negative")
	}
	return nil
}

// carry sends what a subscription asked for, until all of it is sent.
func (ses *session) carry(ctx context.Context, id dsec.SandboxID, p process.Process, u *dsecv1.ExecSubscription, sub *subscription) {
	defer ses.s.cfg.Inside.Attach(id)()
	errs := make(chan error, 3)
	n := 1
	go func() { errs <- ses.end(ctx, p, u) }()
	for st, from := range map[process.Stream]int64{process.Stdout: u.StdoutOffset, process.Stderr: u.StderrOffset} {
		if sub.credit == nil {
			break
		}
		n++
		go func() {
			errs <- follow(ctx, p, st, from, sub.credit[st], func(c *dsecv1.OutputChunk) error {
				return ses.send(&dsecv1.Frame{Item: &dsecv1.Frame_Output{Output: &dsecv1.ExecOutput{
					Sandbox: u.Sandbox, Exec: u.Exec, Chunk: c}}})
			})
		}()
	}
	var first error
	for range n {
		if err := <-errs; err != nil && first == nil {
			first = err
			if ctx.Err() == nil { // not unsubscribed: say why it ends, once
				_ = ses.send(wire.SubscriptionError(u.Sandbox, u.Exec, ses.s.closing(ses.s.ended(id, err))))
			}
			sub.cancel()
		}
	}
}

// end waits for the exec and says how it ended.
func (ses *session) end(ctx context.Context, p process.Process, u *dsecv1.ExecSubscription) error {
	res, err := p.Wait(ctx)
	if err != nil {
		return err
	}
	ended := &dsecv1.ExecEnded{Sandbox: u.Sandbox, Exec: u.Exec, Result: wire.ExecResult(res)}
	if u.Mode == "kept" {
		if ended.Stdout, ended.Stderr, err = keptOf(ctx, p); err != nil {
			return err
		}
	}
	return ses.send(&dsecv1.Frame{Item: &dsecv1.Frame_Ended{Ended: ended}})
}

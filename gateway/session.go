package gateway

import (
	"context"
	"sync"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/api/dsec/v1"
	"github.com/opendsec/dsec/api/wire"
	"github.com/opendsec/dsec/iam"
	"github.com/opendsec/dsec/internal/crew"
)

// sessions are the open event streams of clients, by id.
type sessions struct {
	mu   sync.Mutex
	open map[string]*session
}

// session is the one stream of a client. It merges a stream from each node on
// which the client subscribed something; what a node sends is taken only when
// the client took what came before.
type session struct {
	id     string
	g      *Gateway
	who    iam.Principal
	scope  string
	filter *dsecv1.EventFilter // nil: no sandbox events
	out    chan *dsecv1.Frame
	ctx    context.Context //nolint:containedctx // the life of the stream
	cancel context.CancelCauseFunc
	crew   crew.Crew

	mu    sync.Mutex
	nodes map[dsec.NodeID]*nodeStream
	seen  map[dsec.NodeID]*timestamppb.Timestamp // up to when events of a node have come
}

// nodeStream is the part of a session that comes from one node.
type nodeStream struct {
	id    string // of the session on the node
	node  dsec.NodeID
	ready chan struct{}               // closed when it is open, or broken
	err   error                       // after ready: why it is not open
	subs  map[string]*dsecv1.ExecName // what is subscribed; guarded by session.mu
	left  map[string]int              // frames that end a subscription and are yet to come
	told  chan struct{}               // closed when the events of the past passed, or it broke
	past  bool                        // after told: they all did
}

func (x *sessions) find(id string, who iam.Principal) (*session, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	ses := x.open[id]
	if ses == nil || ses.who != who {
		return nil, dsec.Errorf(dsec.NotFound, "find session", dsec.Quote(id), "no such session is open: open the event stream first")
	}
	return ses, nil
}

// startSession registers a session; an older one of the same id and caller ends.
func (g *Gateway) startSession(ctx context.Context, req *dsecv1.OpenRequest) (*session, error) {
	id := req.Session
	if id == "" {
		id = "e" + dsec.Random(26)
	}
	if !wire.SessionID(id) {
		return nil, dsec.Errorf(dsec.Invalid, "open session", dsec.Quote(id), "want 16 to 64 of A-Z a-z 0-9 _")
	}
	ses := &session{id: id, g: g, who: principal(ctx), scope: scope(ctx), filter: req.Events,
		out: make(chan *dsecv1.Frame), nodes: map[dsec.NodeID]*nodeStream{},
		seen: map[dsec.NodeID]*timestamppb.Timestamp{}}
	ses.ctx, ses.cancel = context.WithCancelCause(ctx)
	x := &g.streams
	x.mu.Lock()
	defer x.mu.Unlock()
	old := x.open[id]
	switch {
	case old != nil && old.who != ses.who:
		return nil, dsec.Errorf(dsec.AlreadyExists, "open session", dsec.Quote(id), "is taken")
	case old != nil:
		old.cancel(dsec.Errorf(dsec.Canceled, "carry session", id, "it was opened again"))
	case len(x.open) >= maxSessions:
		return nil, dsec.Errorf(dsec.ResourceExhausted, "open session", id, "%d sessions are open", maxSessions)
	}
	x.open[id] = ses
	return ses, nil
}

func (ses *session) close() {
	x := &ses.g.streams
	x.mu.Lock()
	if x.open[ses.id] == ses {
		delete(x.open, ses.id)
	}
	x.mu.Unlock()
	ses.crew.Close()
	ses.cancel(nil)
	ses.crew.Wait()
}

// send waits until the client takes a frame, or the session ends.
func (ses *session) send(f *dsecv1.Frame) error {
	select {
	case ses.out <- f:
		return nil
	case <-ses.ctx.Done():
		return context.Cause(ses.ctx)
	}
}

// stream returns the open stream to a node, and opens it if need be.
func (ses *session) stream(ctx context.Context, node dsec.NodeID) (*nodeStream, error) {
	ses.mu.Lock()
	ns := ses.nodes[node]
	if ns == nil {
		ns = &nodeStream{id: "n" + dsec.Random(26), node: node, ready: make(chan struct{}),
			subs: map[string]*dsecv1.ExecName{}, left: map[string]int{}, told: make(chan struct{})}
		if !ses.crew.Go(func() { ses.run(ns) }) {
			ses.mu.Unlock()
			return nil, dsec.Errorf(dsec.NotFound, "find session", ses.id, "it has ended")
		}
		ses.nodes[node] = ns
	}
	ses.mu.Unlock()
	select {
	case <-ns.ready:
		return ns, ns.err
	case <-ses.ctx.Done():
		return nil, dsec.E(dsec.Canceled, "open session", ses.id, context.Cause(ses.ctx))
	case <-ctx.Done():
		return nil, dsec.E(dsec.ClassOf(ctx.Err()), "open session on node", string(node), context.Cause(ctx))
	}
}

// run carries what one node sends; when it breaks, every subscription there
// ends with an error that says whether to subscribe again.
func (ses *session) run(ns *nodeStream) {
	opened := false
	err := ses.read(ns, func() {
		opened = true
		close(ns.ready)
	})
	if dsec.ClassOf(err) == dsec.Internal {
		err = dsec.E(dsec.Unavailable, "carry session from node", string(ns.node), err)
	}
	ses.mu.Lock()
	delete(ses.nodes, ns.node)
	lost := ns.subs
	ns.subs = nil
	ses.mu.Unlock()
	if !opened {
		ns.err = err
		close(ns.ready)
	}
	if !ns.past {
		close(ns.told)
	}
	for _, n := range lost {
		_ = ses.send(wire.SubscriptionError(n.Sandbox, n.Exec, err)) // the session has ended
	}
	if opened && ses.filter != nil {
		_ = ses.send(wire.SubscriptionError("", "", err))
	}
}

func (ses *session) read(ns *nodeStream, opened func()) error {
	ctx, cancel := context.WithCancel(ses.ctx)
	defer cancel()
	r, closer, err := ses.g.cfg.Cluster.Stream(ctx, ns.node, wire.PathSession, ses.scope,
		&dsecv1.NodeSession{Session: ns.id, Events: ses.eventsOf(ns.node)})
	if err != nil {
		return err
	}
	defer closer.Close()
	return relay(r, closer, func() *dsecv1.Frame { return &dsecv1.Frame{} }, func(f *dsecv1.Frame) error {
		switch {
		case f.GetHello() != nil:
			opened()
			return nil
		case f.GetLive() != nil:
			if !ns.past {
				ns.past = true
				close(ns.told)
			}
			return nil
		case f.GetEvent() != nil:
			ses.mu.Lock()
			ses.seen[ns.node] = f.GetEvent().Time
			ses.mu.Unlock()
		case f.Item == nil: // a sign of life
			return nil
		}
		ses.note(ns, f)
		return ses.send(f)
	}, &dsecv1.Frame{})
}

// add notes a subscription before the node hears of it.
func (ses *session) add(ns *nodeStream, sandbox, exec, mode string) {
	ses.mu.Lock()
	defer ses.mu.Unlock()
	if ns.subs == nil {
		return // broken meanwhile: the call to the node will say so
	}
	k := wire.ExecKey(sandbox, exec)
	ns.subs[k] = &dsecv1.ExecName{Sandbox: sandbox, Exec: exec}
	ns.left[k] = 1
	if mode == "stream" {
		ns.left[k] = 3 // the end, and of each stream the end
	}
}

func (ses *session) drop(ns *nodeStream, sandbox, exec string) {
	ses.mu.Lock()
	defer ses.mu.Unlock()
	delete(ns.subs, wire.ExecKey(sandbox, exec))
	delete(ns.left, wire.ExecKey(sandbox, exec))
}

// note forgets a subscription when the last frame of it passes.
func (ses *session) note(ns *nodeStream, f *dsecv1.Frame) {
	var k string
	switch {
	case f.GetError() != nil:
		ses.drop(ns, f.GetError().Sandbox, f.GetError().Exec)
		return
	case f.GetEnded() != nil:
		k = wire.ExecKey(f.GetEnded().Sandbox, f.GetEnded().Exec)
	case f.GetOutput().GetChunk().GetEof():
		k = wire.ExecKey(f.GetOutput().Sandbox, f.GetOutput().Exec)
	default:
		return
	}
	ses.mu.Lock()
	defer ses.mu.Unlock()
	if ns.left[k]--; ns.left[k] <= 0 {
		delete(ns.subs, k)
		delete(ns.left, k)
	}
}

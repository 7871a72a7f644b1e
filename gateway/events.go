package gateway

import (
	"context"
	"time"

	"connectrpc.com/connect"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/api/dsec/v1"
	"github.com/opendsec/dsec/api/wire"
)

// events is the service of that name.
type events struct{ *Gateway }

func (e *events) Open(ctx context.Context, req *dsecv1.OpenRequest, stream *connect.ServerStream[dsecv1.Frame]) error {
	ses, err := e.startSession(ctx, req)
	if err != nil {
		return err
	}
	e.metrics.sessions.Inc()
	defer e.metrics.sessions.Dec()
	defer ses.close()
	if req.Events != nil {
		ses.events()
	}
	hello := &dsecv1.Hello{Session: ses.id, AliveEvery: aliveEvery.Seconds()}
	if err := stream.Send(&dsecv1.Frame{Item: &dsecv1.Frame_Hello{Hello: hello}}); err != nil {
		return err
	}
	tick := time.NewTicker(aliveEvery)
	defer tick.Stop()
	for {
		f := &dsecv1.Frame{Item: &dsecv1.Frame_Alive{Alive: &dsecv1.Alive{}}}
		select {
		case <-ses.ctx.Done():
			cause := context.Cause(ses.ctx)
			if dsec.ClassOf(cause) == dsec.Internal {
				cause = dsec.E(dsec.Canceled, "carry session", ses.id, cause)
			}
			return cause
		case f = <-ses.out:
		case <-tick.C:
		}
		if err := stream.Send(f); err != nil {
			return err
		}
	}
}

// byNode sorts what names sandboxes; what names none gets an error frame.
func byNode[T interface{ GetSandbox() string }](list []T, bad func(T, error)) map[dsec.NodeID][]T {
	m := map[dsec.NodeID][]T{}
	for _, x := range list {
		_, node, err := dsec.ParseSandboxID(x.GetSandbox())
		if err != nil {
			bad(x, err)
			continue
		}
		m[node] = append(m[node], x)
	}
	return m
}

func (e *events) Subscribe(ctx context.Context, req *dsecv1.SubscribeRequest) (*dsecv1.SubscribeResponse, error) {
	ses, err := e.streams.find(req.Session, principal(ctx))
	if err != nil {
		return nil, err
	}
	fail := func(u *dsecv1.ExecSubscription, err error) { ses.report(u.Sandbox, u.Exec, err) }
	for node, execs := range byNode(req.Execs, fail) {
		err := ses.subscribe(ctx, node, execs)
		for _, u := range execs {
			if err != nil {
				fail(u, err)
			}
		}
	}
	return &dsecv1.SubscribeResponse{}, nil
}

func (ses *session) subscribe(ctx context.Context, node dsec.NodeID, execs []*dsecv1.ExecSubscription) error {
	ns, err := ses.stream(ctx, node)
	if err != nil {
		return err
	}
	for _, u := range execs {
		ses.add(ns, u.Sandbox, u.Exec, u.Mode)
	}
	err = ses.g.cfg.Cluster.Call(ctx, node, wire.VerbMux, ses.scope, &dsecv1.MuxCall{Session: ns.id, Subscribe: execs}, nil)
	if err != nil {
		for _, u := range execs {
			ses.drop(ns, u.Sandbox, u.Exec)
		}
	}
	return err
}

// report sends an error frame without waiting for the client to take it.
func (ses *session) report(sandbox, exec string, err error) {
	ses.crew.Go(func() { _ = ses.send(wire.SubscriptionError(sandbox, exec, err)) }) // the session has ended
}

// existing returns the stream of a node if there is one.
func (ses *session) existing(node dsec.NodeID) *nodeStream {
	ses.mu.Lock()
	defer ses.mu.Unlock()
	return ses.nodes[node]
}

// onNodes tells each node what is meant for the execs there. Malformed names
// and nodes on which nothing is subscribed are passed over.
func onNodes[T interface{ GetSandbox() string }](ctx context.Context, ses *session, list []T, call func([]T) *dsecv1.MuxCall, told func(*nodeStream, []T)) error {
	for node, execs := range byNode(list, func(T, error) {}) {
		ns := ses.existing(node)
		if ns == nil {
			continue
		}
		m := call(execs)
		m.Session = ns.id
		if err := ses.g.cfg.Cluster.Call(ctx, node, wire.VerbMux, ses.scope, m, nil); err != nil {
			return err
		}
		if told != nil {
			told(ns, execs)
		}
	}
	return nil
}

func (e *events) Unsubscribe(ctx context.Context, req *dsecv1.UnsubscribeRequest) (*dsecv1.UnsubscribeResponse, error) {
	ses, err := e.streams.find(req.Session, principal(ctx))
	if err != nil {
		return nil, err
	}
	err = onNodes(ctx, ses, req.Execs, func(execs []*dsecv1.ExecName) *dsecv1.MuxCall {
		return &dsecv1.MuxCall{Unsubscribe: execs}
	}, func(ns *nodeStream, execs []*dsecv1.ExecName) {
		for _, x := range execs {
			ses.drop(ns, x.Sandbox, x.Exec)
		}
	})
	if err != nil {
		return nil, err
	}
	return &dsecv1.UnsubscribeResponse{}, nil
}

func (e *events) Ack(ctx context.Context, req *dsecv1.AckRequest) (*dsecv1.AckResponse, error) {
	ses, err := e.streams.find(req.Session, principal(ctx))
	if err != nil {
		return nil, err
	}
	err = onNodes(ctx, ses, req.Acks, func(acks []*dsecv1.ExecAck) *dsecv1.MuxCall {
		return &dsecv1.MuxCall{Acks: acks}
	}, nil)
	if err != nil {
		return nil, err
	}
	return &dsecv1.AckResponse{}, nil
}

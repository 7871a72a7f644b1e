package cluster

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/api/dsec/v1"
	"github.com/opendsec/dsec/api/wire"
)

const (
	callWithin  = time.Minute // a call whose caller set no deadline
	dialWithin  = 5 * time.Second
	maxReply    = 64 << 20 // on the data connection
	idleConns   = 64
	idleTimeout = time.Minute
)

// onData lists the verbs whose answers are large or whose callers may leave
// while they wait.
var onData = map[string]bool{wire.VerbWait: true, wire.VerbKept: true, wire.VerbList: true, wire.VerbListFiles: true,
	wire.VerbLayers: true, wire.VerbWriteStdin: true, wire.VerbCommit: true, wire.VerbGrade: true, wire.VerbCall: true, wire.VerbChanges: true, wire.VerbMerge: true,
	wire.VerbScreenshot: true, wire.VerbConsole: true, wire.VerbAct: true, wire.VerbMark: true, wire.VerbRevert: true}

// Call does one control call on behalf of a project ("" sees all). resp may
// be nil.
func (c *Cluster) Call(ctx context.Context, id dsec.NodeID, verb, project string, req, resp proto.Message) error {
	life, reg, rt, err := c.reach(id)
	if err != nil {
		return err
	}
	ctx, cancel := bound(ctx, life)
	defer cancel()
	body, err := proto.Marshal(req)
	if err != nil {
		return dsec.E(dsec.Internal, "call node", string(id), err)
	}
	deadline, _ := ctx.Deadline()
	call, err := proto.Marshal(&dsecv1.NodeCall{Project: project, Deadline: time.Until(deadline).Seconds(), Body: body})
	if err != nil {
		return dsec.E(dsec.Internal, "call node", string(id), err)
	}
	large := onData[verb] || len(call) > wire.MaxControl || waits(req)
	reply := &dsecv1.NodeReply{}
	if !large {
		reply, err = c.request(ctx, id, verb, call)
		large = err == nil && reply.Oversize
	}
	if large {
		reply, err = post(ctx, rt, reg, verb, call)
	}
	if err != nil {
		return callError(ctx, id, verb, err)
	}
	if reply.Error != nil {
		return wire.Err(reply.Error)
	}
	if resp == nil {
		return nil
	}
	if err := proto.Unmarshal(reply.Body, resp); err != nil {
		return dsec.E(dsec.Corrupt, "call node", string(id), err)
	}
	return nil
}

// errUnheard: the call surely did not reach the node.
var errUnheard = errors.New("its agent does not listen")

// waits: an exec that is waited for must end its wait when the caller leaves.
func waits(req proto.Message) bool {
	e, ok := req.(*dsecv1.ExecRequest)
	return ok && e.Wait > 0
}

// bound gives ctx a deadline and ends it with the node's life.
func bound(ctx, life context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(life, func() { cancel(context.Cause(life)) })
	release := func() {}
	if _, ok := ctx.Deadline(); !ok {
		ctx, release = context.WithTimeout(ctx, callWithin)
	}
	return ctx, func() {
		stop()
		release()
		cancel(context.Canceled)
	}
}

func (c *Cluster) request(ctx context.Context, id dsec.NodeID, verb string, call []byte) (*dsecv1.NodeReply, error) {
	msg, err := c.nc.RequestWithContext(ctx, wire.Subject(id, verb), call)
	if err != nil {
		return nil, err
	}
	reply := &dsecv1.NodeReply{}
	return reply, proto.Unmarshal(msg.Data, reply)
}

// callError classifies a failed call: what surely did not reach the node is
// Unavailable; so is a node that died, though the outcome is unknown then.
func callError(ctx context.Context, id dsec.NodeID, verb string, err error) error {
	op := "call node (" + verb + ")"
	if cause := context.Cause(ctx); cause != nil {
		if e, ok := errors.AsType[*dsec.Error](cause); ok {
			return e
		}
		return dsec.E(dsec.ClassOf(cause), op, string(id), cause)
	}
	if errors.Is(err, nats.ErrNoResponders) {
		return dsec.E(dsec.Unavailable, op, string(id), errUnheard)
	}
	if e, ok := errors.AsType[*dsec.Error](err); ok {
		return e
	}
	return dsec.E(dsec.Unavailable, op, string(id), err)
}

// dataTransport dials the data listener of a registration.
func dataTransport(r *dsecv1.Registration) *http.Transport {
	network, address, _ := strings.Cut(r.Address, ":")
	return &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{Timeout: dialWithin}).DialContext(ctx, network, address)
		},
		DisableCompression: true, MaxIdleConnsPerHost: idleConns, IdleConnTimeout: idleTimeout,
		WriteBufferSize: 64 << 10, ReadBufferSize: 64 << 10,
	}
}

func post(ctx context.Context, rt *http.Transport, reg *dsecv1.Registration, verb string, call []byte) (*dsecv1.NodeReply, error) {
	resp, err := do(ctx, rt, reg, wire.Request{Method: http.MethodPost, Path: wire.PathCall + verb, Body: bytes.NewReader(call)})
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, maxReply))
	if err != nil {
		return nil, err
	}
	reply := &dsecv1.NodeReply{}
	return reply, proto.Unmarshal(b, reply)
}

// Do sends a request over the data connection. An answer that is no success
// is returned as its error. Until the answer begins it ends with the life of
// the node; after that with ctx, or when the connection breaks: missing
// heartbeats alone cut no stream.
func (c *Cluster) Do(ctx context.Context, id dsec.NodeID, r wire.Request) (*http.Response, error) {
	life, reg, rt, err := c.reach(id)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(life, func() { cancel(context.Cause(life)) })
	resp, err := do(ctx, rt, reg, r)
	stop()
	if err != nil {
		defer cancel(nil)
		path, _, _ := strings.Cut(r.Path, "?")
		return nil, callError(ctx, id, path, err)
	}
	resp.Body = &body{resp.Body, cancel}
	return resp, nil
}

// body ends the context of its request when it is closed.
type body struct {
	io.ReadCloser
	cancel context.CancelCauseFunc
}

func (b *body) Close() error {
	defer b.cancel(nil)
	return b.ReadCloser.Close()
}

func do(ctx context.Context, rt *http.Transport, reg *dsecv1.Registration, r wire.Request) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, r.Method, "http://node"+r.Path, r.Body)
	if err != nil {
		return nil, err
	}
	for k, v := range r.Header {
		req.Header[k] = v
	}
	if r.Length > 0 {
		req.ContentLength = r.Length
	}
	req.Header.Set("Authorization", "Bearer "+reg.Token)
	req.Header.Set(wire.HeaderProject, r.Project)
	resp, err := rt.RoundTrip(req)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode == http.StatusUnauthorized {
		// Our token is that of the process before: nobody outside is to hear of it.
		_ = resp.Body.Close()
		return nil, dsec.Errorf(dsec.Unavailable, "call node", reg.Node, "it has started again and is not registered yet")
	}
	if resp.StatusCode >= 400 {
		defer resp.Body.Close()
		b, _ := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
		return nil, wire.HTTPError("call node", resp.StatusCode, b)
	}
	return resp, nil
}

// Stream sends a message and returns the frames that come back. The caller
// closes the closer.
func (c *Cluster) Stream(ctx context.Context, id dsec.NodeID, path, project string, m proto.Message) (*wire.FrameReader, io.Closer, error) {
	body, err := proto.Marshal(m)
	if err != nil {
		return nil, nil, dsec.E(dsec.Internal, "call node", string(id), err)
	}
	resp, err := c.Do(ctx, id, wire.Request{Method: http.MethodPost, Path: path, Project: project, Body: bytes.NewReader(body)})
	if err != nil {
		return nil, nil, err
	}
	return wire.NewFrameReader("read from node", resp.Body), resp.Body, nil
}

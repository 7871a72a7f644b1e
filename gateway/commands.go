package gateway

import (
	"context"
	"time"

	"connectrpc.com/connect"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/api/dsec/v1"
	"github.com/opendsec/dsec/api/wire"
)

// commands is the service of that name.
type commands struct{ *Gateway }

// waitGrace is what a call may take beyond the wait it was asked for.
const waitGrace = 30 * time.Second

func (c *commands) Exec(ctx context.Context, req *dsecv1.ExecRequest) (*dsecv1.ExecResponse, error) {
	if req.CallId == "" {
		req.CallId = "x" + dsec.Random(20)
	}
	if _, err := wire.ExecSpecFrom(req.CallId, req.Spec); err != nil {
		return nil, err
	}
	ctx, cancel := within(ctx, time.Minute+wire.Timeout(req.Wait, 0, 600*time.Second))
	defer cancel()
	resp := &dsecv1.ExecResponse{}
	if req.Subscribe == nil {
		return resp, c.on(ctx, req.Sandbox, wire.VerbExec, req, resp)
	}
	ses, err := c.streams.find(req.Subscribe.Session, principal(ctx))
	if err != nil {
		return nil, err
	}
	_, node, err := dsec.ParseSandboxID(req.Sandbox)
	if err != nil {
		return nil, err
	}
	ns, err := ses.stream(ctx, node)
	if err != nil {
		return nil, err
	}
	ses.add(ns, req.Sandbox, req.CallId, req.Subscribe.Mode)
	req.Subscribe.Session = ns.id
	if err = c.on(ctx, req.Sandbox, wire.VerbExec, req, resp); err != nil {
		ses.drop(ns, req.Sandbox, req.CallId)
	}
	return resp, err
}

func (c *commands) WriteStdin(ctx context.Context, req *dsecv1.WriteStdinRequest) (*dsecv1.WriteStdinResponse, error) {
	const most = 1 << 20
	if len(req.Data) > most {
		return nil, dsec.Errorf(dsec.Invalid, "write stdin", req.Exec, "%d bytes, at most %d: use PUT …/stdin", len(req.Data), most)
	}
	resp := &dsecv1.WriteStdinResponse{}
	return resp, c.on(ctx, req.Sandbox, wire.VerbWriteStdin, req, resp)
}

func (c *commands) CloseStdin(ctx context.Context, req *dsecv1.CloseStdinRequest) (*dsecv1.CloseStdinResponse, error) {
	resp := &dsecv1.CloseStdinResponse{}
	return resp, c.on(ctx, req.Sandbox, wire.VerbCloseStdin, req, resp)
}

func (c *commands) Signal(ctx context.Context, req *dsecv1.SignalRequest) (*dsecv1.SignalResponse, error) {
	resp := &dsecv1.SignalResponse{}
	return resp, c.on(ctx, req.Sandbox, wire.VerbSignal, req, resp)
}

func (c *commands) Kill(ctx context.Context, req *dsecv1.KillRequest) (*dsecv1.KillResponse, error) {
	resp := &dsecv1.KillResponse{}
	return resp, c.on(ctx, req.Sandbox, wire.VerbKill, req, resp)
}

func (c *commands) Resize(ctx context.Context, req *dsecv1.ResizeRequest) (*dsecv1.ResizeResponse, error) {
	resp := &dsecv1.ResizeResponse{}
	return resp, c.on(ctx, req.Sandbox, wire.VerbResize, req, resp)
}

func (c *commands) Wait(ctx context.Context, req *dsecv1.WaitRequest) (*dsecv1.WaitResponse, error) {
	ctx, cancel := within(ctx, waitGrace+wire.Timeout(req.Timeout, 30*time.Second, 600*time.Second))
	defer cancel()
	resp := &dsecv1.WaitResponse{}
	return resp, c.on(ctx, req.Sandbox, wire.VerbWait, req, resp)
}

func (c *commands) Kept(ctx context.Context, req *dsecv1.KeptRequest) (*dsecv1.KeptResponse, error) {
	resp := &dsecv1.KeptResponse{}
	return resp, c.on(ctx, req.Sandbox, wire.VerbKept, req, resp)
}

func (c *commands) Release(ctx context.Context, req *dsecv1.ReleaseRequest) (*dsecv1.ReleaseResponse, error) {
	resp := &dsecv1.ReleaseResponse{}
	return resp, c.on(ctx, req.Sandbox, wire.VerbRelease, req, resp)
}

func (c *commands) Output(ctx context.Context, req *dsecv1.OutputRequest, stream *connect.ServerStream[dsecv1.OutputResponse]) error {
	r, closer, err := c.open(ctx, req.Sandbox, wire.PathOutput, req)
	if err != nil {
		return err
	}
	defer closer.Close()
	return relay(r, closer, func() *dsecv1.OutputResponse { return &dsecv1.OutputResponse{} }, stream.Send,
		&dsecv1.OutputResponse{Alive: true})
}

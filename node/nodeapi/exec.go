package nodeapi

import (
	"context"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/api/dsec/v1"
	"github.com/opendsec/dsec/api/wire"
	"github.com/opendsec/dsec/process"
)

const (
	longestWait = 600 * time.Second
	defaultWait = 30 * time.Second
	killGlance  = 2 * time.Millisecond // enough for an ended exec to say so
)

func (s *Server) exec(ctx context.Context, who caller, req *dsecv1.ExecRequest) (proto.Message, error) {
	id, err := s.own(ctx, who, req.Sandbox)
	if err != nil {
		return nil, err
	}
	spec, err := wire.ExecSpecFrom(req.CallId, req.Spec)
	if err != nil {
		return nil, err
	}
	var ses *session
	if req.Subscribe != nil {
		if ses, err = s.sessions.find(req.Subscribe.Session, who); err != nil {
			return nil, err
		}
	}
	p, err := s.cfg.Inside.Exec(ctx, id, spec)
	if err != nil {
		return nil, s.ended(id, err)
	}
	resp := &dsecv1.ExecResponse{Exec: p.Spec().ID}
	if ses != nil {
		u := req.Subscribe
		ses.subscribe(id, p, &dsecv1.ExecSubscription{Sandbox: req.Sandbox, Exec: resp.Exec, Mode: u.Mode,
			StdoutOffset: u.StdoutOffset, StderrOffset: u.StderrOffset, Window: u.Window})
	}
	if req.Wait > 0 {
		resp.Result, resp.Stdout, resp.Stderr, err = s.await(ctx, id, p, wire.Timeout(req.Wait, 0, longestWait), req.Kept)
	}
	return resp, err
}

// await waits for the end up to a time; no result means that it runs on.
func (s *Server) await(ctx context.Context, id dsec.SandboxID, p process.Process, most time.Duration, kept bool) (r *dsecv1.ExecResult, stdout, stderr *dsecv1.KeptOutput, err error) {
	defer s.cfg.Inside.Attach(id)()
	wctx, cancel := context.WithTimeout(ctx, most)
	defer cancel()
	res, err := p.Wait(wctx)
	switch {
	case err != nil && wctx.Err() != nil && ctx.Err() == nil:
		return nil, nil, nil, nil
	case err != nil:
		return nil, nil, nil, s.ended(id, err)
	}
	r = wire.ExecResult(res)
	if kept {
		stdout, stderr, err = keptOf(ctx, p)
	}
	return r, stdout, stderr, s.ended(id, err)
}

func keptOf(ctx context.Context, p process.Process) (stdout, stderr *dsecv1.KeptOutput, err error) {
	if stdout, err = keptStream(ctx, p, process.Stdout); err != nil {
		return nil, nil, err
	}
	if p.Spec().PTY != nil {
		return stdout, &dsecv1.KeptOutput{}, nil
	}
	stderr, err = keptStream(ctx, p, process.Stderr)
	return stdout, stderr, err
}

func keptStream(ctx context.Context, p process.Process, st process.Stream) (*dsecv1.KeptOutput, error) {
	head, tail, at, err := p.Kept(ctx, st)
	if err != nil {
		return nil, err
	}
	return &dsecv1.KeptOutput{Head: head, Tail: tail, TailOffset: at}, nil
}

// process finds an exec of the caller.
func (s *Server) process(ctx context.Context, who caller, sandbox, exec string) (dsec.SandboxID, process.Process, error) {
	id, err := s.own(ctx, who, sandbox)
	if err != nil {
		return "", nil, err
	}
	if !wire.ExecID(exec) {
		return "", nil, dsec.Errorf(dsec.Invalid, "find exec", dsec.Quote(exec), "not the id of an exec")
	}
	p, err := s.cfg.Inside.Process(ctx, id, exec)
	if err != nil {
		return "", nil, s.ended(id, err)
	}
	return id, p, nil
}

func (s *Server) wait(ctx context.Context, who caller, req *dsecv1.WaitRequest) (proto.Message, error) {
	id, p, err := s.process(ctx, who, req.Sandbox, req.Exec)
	if err != nil {
		return nil, err
	}
	resp := &dsecv1.WaitResponse{}
	resp.Result, resp.Stdout, resp.Stderr, err = s.await(ctx, id, p, wire.Timeout(req.Timeout, defaultWait, longestWait), req.Kept)
	return resp, err
}

func (s *Server) kept(ctx context.Context, who caller, req *dsecv1.KeptRequest) (proto.Message, error) {
	id, p, err := s.process(ctx, who, req.Sandbox, req.Exec)
	if err != nil {
		return nil, err
	}
	resp := &dsecv1.KeptResponse{}
	resp.Stdout, resp.Stderr, err = keptOf(ctx, p)
	return resp, s.ended(id, err)
}

func (s *Server) signal(ctx context.Context, who caller, req *dsecv1.SignalRequest) (proto.Message, error) {
	id, p, err := s.process(ctx, who, req.Sandbox, req.Exec)
	if err != nil {
		return nil, err
	}
	if req.Signal < 1 || req.Signal > 64 {
		return nil, dsec.Errorf(dsec.Invalid, "signal exec", req.Exec, "no signal %d", req.Signal)
	}
	return &dsecv1.SignalResponse{}, s.ended(id, p.Signal(ctx, int(req.Signal)))
}

// kill tells whether there was something to kill.
func (s *Server) kill(ctx context.Context, who caller, req *dsecv1.KillRequest) (proto.Message, error) {
	id, p, err := s.process(ctx, who, req.Sandbox, req.Exec)
	if err != nil {
		if c := dsec.ClassOf(err); c == dsec.NotFound || c == dsec.SandboxGone {
			return &dsecv1.KillResponse{}, nil
		}
		return nil, err
	}
	soon, cancel := context.WithTimeout(ctx, killGlance)
	defer cancel()
	_, werr := p.Wait(soon)
	if err := p.Kill(ctx); err != nil && dsec.ClassOf(err) != dsec.SandboxGone {
		return nil, s.ended(id, err)
	}
	return &dsecv1.KillResponse{Killed: werr != nil && dsec.ClassOf(werr) != dsec.SandboxGone}, nil
}

func (s *Server) resize(ctx context.Context, who caller, req *dsecv1.ResizeRequest) (proto.Message, error) {
	id, p, err := s.process(ctx, who, req.Sandbox, req.Exec)
	if err != nil {
		return nil, err
	}
	size, err := wire.SizeFrom(req.Size)
	if err != nil {
		return nil, err
	}
	return &dsecv1.ResizeResponse{}, s.ended(id, p.Resize(ctx, size))
}

func (s *Server) release(ctx context.Context, who caller, req *dsecv1.ReleaseRequest) (proto.Message, error) {
	id, p, err := s.process(ctx, who, req.Sandbox, req.Exec)
	if err != nil {
		if dsec.ClassOf(err) == dsec.NotFound {
			return &dsecv1.ReleaseResponse{}, nil
		}
		return nil, err
	}
	s.stdins.forget(id, req.Exec)
	return &dsecv1.ReleaseResponse{}, s.ended(id, p.Release(ctx))
}

// stdins counts what was written to each open stdin, so that a retry writes
// nothing twice, and lets one writer at a time through.
type stdins struct {
	mu   sync.Mutex
	open map[string]*stdin
}

type stdin struct {
	turn    chan struct{} // holds one element while somebody writes
	written int64
	known   bool // written is right: counted from the start, or told by a caller
}

const maxStdins = 1 << 16

func (x *stdins) get(id dsec.SandboxID, exec string) *stdin {
	x.mu.Lock()
	defer x.mu.Unlock()
	key := wire.ExecKey(string(id), exec)
	if x.open == nil || len(x.open) >= maxStdins {
		x.open = map[string]*stdin{}
	}
	in := x.open[key]
	if in == nil {
		in = &stdin{turn: make(chan struct{}, 1)}
		x.open[key] = in
	}
	return in
}

func (x *stdins) forget(id dsec.SandboxID, exec string) {
	x.mu.Lock()
	defer x.mu.Unlock()
	delete(x.open, wire.ExecKey(string(id), exec))
}

// take waits for the turn to write from an offset (nil: append), and returns
// how many of the caller's bytes are written already. An offset of an exec
// nothing is known of (the agent restarted) is believed.
func (in *stdin) take(ctx context.Context, exec string, offset *int64) (skip int64, err error) {
	select {
	case in.turn <- struct{}{}:
	case <-ctx.Done():
		return 0, dsec.E(dsec.ClassOf(ctx.Err()), "write stdin", exec, ctx.Err())
	}
	if offset == nil {
		return 0, nil
	}
	if err := checkOffset(exec, *offset); err != nil { // before anything is believed
		<-in.turn
		return 0, err
	}
	if !in.known {
		in.written, in.known = *offset, true
	}
	if *offset > in.written {
		<-in.turn
		return 0, dsec.Errorf(dsec.Conflict, "write stdin", exec, "offset %d, but %d bytes are written", *offset, in.written)
	}
	return in.written - *offset, nil
}

func checkOffset(exec string, offset int64) error {
	if offset < 0 || offset > wire.MaxOffset {
		return dsec.Errorf(dsec.Invalid, "write stdin", exec, "offset %d, want 0 to %d", offset, int64(wire.MaxOffset))
	}
	return nil
}

func (s *Server) writeStdin(ctx context.Context, who caller, req *dsecv1.WriteStdinRequest) (proto.Message, error) {
	id, p, err := s.process(ctx, who, req.Sandbox, req.Exec)
	if err != nil {
		return nil, err
	}
	defer s.cfg.Inside.Attach(id)()
	in := s.stdins.get(id, req.Exec)
	skip, err := in.take(ctx, req.Exec, req.Offset)
	if err != nil {
		return nil, err
	}
	defer func() { <-in.turn }()
	data := req.Data[min(skip, int64(len(req.Data))):]
	if len(data) > 0 {
		n, err := p.Write(ctx, data)
		in.written += int64(n)
		if err != nil {
			return nil, s.ended(id, err)
		}
	}
	if req.Close {
		err = p.CloseStdin(ctx)
	}
	return &dsecv1.WriteStdinResponse{Offset: in.written}, s.ended(id, err)
}

func (s *Server) closeStdin(ctx context.Context, who caller, req *dsecv1.CloseStdinRequest) (proto.Message, error) {
	id, p, err := s.process(ctx, who, req.Sandbox, req.Exec)
	if err != nil {
		return nil, err
	}
	return &dsecv1.CloseStdinResponse{}, s.ended(id, p.CloseStdin(ctx))
}

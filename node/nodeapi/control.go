package nodeapi

import (
	"context"
	"io"
	"net/http"
	"runtime/debug"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/api/dsec/v1"
	"github.com/opendsec/dsec/api/wire"
)

const (
	longestCall  = 30 * time.Minute
	defaultCall  = time.Minute
	maxCallBytes = 32 << 20 // on the data connection
)

// caller is on whose behalf a call is done.
type caller struct{ project string } // "" sees every project

// verb does one control call.
type verb func(ctx context.Context, who caller, body []byte) (proto.Message, error)

// unary makes a verb of a function on its request message.
func unary[Q any, P interface {
	*Q
	proto.Message
}](fn func(ctx context.Context, who caller, req P) (proto.Message, error)) verb {
	return func(ctx context.Context, who caller, body []byte) (proto.Message, error) {
		req := P(new(Q))
		if err := proto.Unmarshal(body, req); err != nil {
			return nil, dsec.E(dsec.Invalid, "decode call", "", err)
		}
		if err := wire.Check(req); err != nil {
			return nil, err
		}
		return fn(ctx, who, req)
	}
}

// control answers a NATS request in a goroutine of its own.
func (s *Server) control(m *nats.Msg) {
	name := m.Subject[strings.LastIndexByte(m.Subject, '.')+1:]
	select {
	case s.calls <- struct{}{}:
	default:
		s.respond(m, &dsecv1.NodeReply{Error: wire.Detail(dsec.Errorf(dsec.Unavailable, "call node", string(s.cfg.Node),
			"%d calls are at work", maxCalls))})
		return
	}
	s.crew.Go(func() {
		defer func() { <-s.calls }()
		s.respond(m, s.call(s.ctx, name, m.Data))
	})
}

func (s *Server) respond(m *nats.Msg, reply *dsecv1.NodeReply) {
	if len(reply.Body) > 2*wire.MaxControl {
		reply = &dsecv1.NodeReply{Oversize: true}
	}
	b, err := proto.Marshal(reply)
	if err == nil {
		err = m.Respond(b)
	}
	if err != nil && s.ctx.Err() == nil {
		s.log.Warn("answer not sent", "subject", m.Subject, "err", err)
	}
}

// call runs one control call under its deadline.
func (s *Server) call(ctx context.Context, name string, data []byte) *dsecv1.NodeReply {
	in := &dsecv1.NodeCall{}
	if err := proto.Unmarshal(data, in); err != nil {
		return &dsecv1.NodeReply{Error: wire.Detail(dsec.E(dsec.Invalid, "decode call", name, err))}
	}
	ctx, cancel := context.WithTimeout(ctx, wire.Timeout(in.Deadline, defaultCall, longestCall))
	defer cancel()
	resp, err := s.do(ctx, name, caller{in.Project}, in.Body)
	if err != nil {
		return &dsecv1.NodeReply{Error: wire.Detail(s.closing(err))}
	}
	body, err := proto.Marshal(resp)
	if err != nil {
		return &dsecv1.NodeReply{Error: wire.Detail(dsec.E(dsec.Internal, "encode answer", name, err))}
	}
	return &dsecv1.NodeReply{Body: body}
}

// closing: what was cut short because the agent ends was not canceled by its
// caller.
func (s *Server) closing(err error) error {
	if s.ctx.Err() != nil && dsec.ClassOf(err) == dsec.Canceled {
		return errClosed
	}
	return err
}

// do runs a verb; a panic costs that call only.
func (s *Server) do(ctx context.Context, name string, who caller, body []byte) (resp proto.Message, err error) {
	fn := s.verbs[name]
	if fn == nil {
		return nil, dsec.Errorf(dsec.Unsupported, "call node", string(s.cfg.Node), "this version has no %s", dsec.Quote(name))
	}
	defer func() {
		if p := recover(); p != nil {
			s.log.Error("panic", "verb", name, "value", p, "stack", string(debug.Stack()))
			err = dsec.Errorf(dsec.Internal, name, "", "%v", p)
		}
	}()
	return fn(ctx, who, body)
}

// serveCall is a control call over the data connection.
func (s *Server) serveCall(w http.ResponseWriter, r *http.Request) {
	data, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxCallBytes))
	if err != nil {
		wire.WriteError(w, dsec.E(dsec.Invalid, "read call", "", err))
		return
	}
	b, err := proto.Marshal(s.call(r.Context(), r.PathValue("verb"), data))
	if err != nil {
		wire.WriteError(w, dsec.E(dsec.Internal, "encode answer", "", err))
		return
	}
	_, _ = w.Write(b) // the gateway sees a short body
}

// owners remembers whose a sandbox is: that never changes.
type owners struct {
	mu sync.Mutex
	of map[dsec.SandboxID]string
}

const maxOwners = 1 << 17

// own checks that a sandbox is of this node and the caller's; to others it
// does not exist.
func (s *Server) own(ctx context.Context, who caller, sandbox string) (dsec.SandboxID, error) {
	id, on, err := dsec.ParseSandboxID(sandbox)
	if err != nil {
		return "", err
	}
	none := dsec.Errorf(dsec.NotFound, "find sandbox", sandbox, "no such sandbox")
	if on != s.cfg.Node {
		return "", none
	}
	if who.project == "" {
		return id, nil
	}
	o := &s.owners
	o.mu.Lock()
	project, ok := o.of[id]
	o.mu.Unlock()
	if !ok {
		sb, err := s.cfg.Service.Get(ctx, id)
		if err != nil {
			return "", err
		}
		project = sb.Project
		o.mu.Lock()
		if o.of == nil || len(o.of) >= maxOwners {
			o.of = map[dsec.SandboxID]string{}
		}
		o.of[id] = project
		o.mu.Unlock()
	}
	if project != who.project {
		return "", none
	}
	return id, nil
}

// ended adds how the sandbox ended to an error that says it is gone.
func (s *Server) ended(id dsec.SandboxID, err error) error {
	if dsec.ClassOf(err) != dsec.SandboxGone {
		return err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(s.ctx), putWithin)
	defer cancel()
	sb, gerr := s.cfg.Service.Get(ctx, id)
	if gerr != nil {
		return err
	}
	return wire.WithResult(err, sb.Result)
}

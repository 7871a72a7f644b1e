package nodeapi

import (
	"context"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/api/dsec/v1"
	"github.com/opendsec/dsec/api/wire"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/node"
)

// table is every verb this node answers.
func (s *Server) table() map[string]verb {
	return s.screenVerbs(map[string]verb{
		wire.VerbCreate:         unary(s.create),
		wire.VerbGet:            unary(s.get),
		wire.VerbList:           unary(s.list),
		wire.VerbStart:          unary(s.start),
		wire.VerbStop:           unary(s.stop),
		wire.VerbDelete:         unary(s.delete),
		wire.VerbPause:          unary(s.pause),
		wire.VerbResume:         unary(s.resume),
		wire.VerbFork:           unary(s.fork),
		wire.VerbCheckpoint:     unary(s.checkpoint),
		wire.VerbFindCheckpoint: unary(s.findCheckpoint),
		wire.VerbRenew:          unary(s.renew),
		wire.VerbSetNetwork:     unary(s.setNetwork),
		wire.VerbEgress:         unary(s.egress),
		wire.VerbSetPhase:       unary(s.setPhase),
		wire.VerbCommit:         unary(s.commit),
		wire.VerbChanges:        unary(s.changes),
		wire.VerbFindings:       unary(s.findings),
		wire.VerbStats:          unary(s.stats),
		wire.VerbGrade:          unary(s.grade),
		wire.VerbCall:           unary(s.callFunction),
		wire.VerbExec:           unary(s.exec),
		wire.VerbWait:           unary(s.wait),
		wire.VerbKept:           unary(s.kept),
		wire.VerbWriteStdin:     unary(s.writeStdin),
		wire.VerbCloseStdin:     once(s, wire.VerbCloseStdin, s.closeStdin),
		wire.VerbSignal:         once(s, wire.VerbSignal, s.signal),
		wire.VerbKill:           once(s, wire.VerbKill, s.kill),
		wire.VerbResize:         once(s, wire.VerbResize, s.resize),
		wire.VerbRelease:        once(s, wire.VerbRelease, s.release),
		wire.VerbMux:            unary(s.subscriptions),
		wire.VerbStat:           unary(s.stat),
		wire.VerbListFiles:      unary(s.listFiles),
		wire.VerbMkdir:          once(s, wire.VerbMkdir, s.mkdir),
		wire.VerbMove:           once(s, wire.VerbMove, s.move),
		wire.VerbRemove:         once(s, wire.VerbRemove, s.remove),
		wire.VerbSetAttr:        once(s, wire.VerbSetAttr, s.setAttr),
		wire.VerbLayers:         unary(s.layers),
		wire.VerbInspect:        unary(s.inspectLayer),
		wire.VerbRemoveRef:      once(s, wire.VerbRemoveRef, s.removeLayer),
		wire.VerbTag:            once(s, wire.VerbTag, s.tagLayer),
		wire.VerbTemplate:       once(s, wire.VerbTemplate, s.template),
		wire.VerbMerge:          once(s, wire.VerbMerge, s.merge),
		wire.VerbTrace:          unary(s.traceLayer),
		wire.VerbEvict:          once(s, wire.VerbEvict, s.evictLayer),
		wire.VerbOnDemand:       unary(s.onDemand),
		wire.VerbDoctor:         unary(s.doctor),
	})
}

func (s *Server) message(sb node.Sandbox) *dsecv1.Sandbox {
	return &dsecv1.Sandbox{Id: string(sb.ID), Project: sb.Project, Spec: wire.Spec(sb.Spec), State: string(sb.State),
		Result: wire.Result(sb.Result), Digests: sb.Digests, Created: wire.Stamp(sb.Created),
		Changed: wire.Stamp(sb.Changed), Expires: wire.Stamp(sb.Expires), Starts: int32(sb.Starts),
		Steps: wire.Steps(sb.Steps), Node: string(s.cfg.Node), Kept: kept(sb.Kept), Blame: wire.Blame(sb.Blame), Network: wire.Network(sb.Network), Phase: wire.Phase(sb.Phase), Grades: wire.Grades(sb.Grades),
		Isolated: sb.Spec.Isolated()}
}

func kept(k *node.Kept) *dsecv1.Kept {
	if k == nil {
		return nil
	}
	return &dsecv1.Kept{Digest: k.Digest, Tag: k.Tag, Until: wire.Stamp(k.Until)}
}

func (s *Server) create(ctx context.Context, who caller, req *dsecv1.NodeCreate) (proto.Message, error) {
	sb, err := s.cfg.Service.Create(ctx, who.project, wire.SpecFrom(req.Spec))
	if err != nil {
		return nil, err
	}
	return &dsecv1.CreateResponse{Sandbox: s.message(sb)}, nil
}

func (s *Server) get(ctx context.Context, who caller, req *dsecv1.GetRequest) (proto.Message, error) {
	id, err := s.own(ctx, who, req.Id)
	if err != nil {
		return nil, err
	}
	sb, err := s.cfg.Service.Get(ctx, id)
	if err != nil {
		return nil, err
	}
	return &dsecv1.GetResponse{Sandbox: s.message(sb)}, nil
}

func (s *Server) list(ctx context.Context, who caller, req *dsecv1.NodeList) (proto.Message, error) {
	states, err := wire.States(req.States)
	if err != nil {
		return nil, err
	}
	list, err := s.cfg.Service.List(ctx, node.Filter{Project: who.project, States: states, Labels: req.Labels,
		Rollout: req.RolloutKey, All: req.All})
	if err != nil {
		return nil, err
	}
	return s.listed(list), nil
}

// changed does one call that answers with the sandbox.
func (s *Server) changed(ctx context.Context, who caller, sandbox string, fn func(id dsec.SandboxID) (node.Sandbox, error)) (*dsecv1.Sandbox, error) {
	id, err := s.own(ctx, who, sandbox)
	if err != nil {
		return nil, err
	}
	sb, err := fn(id)
	if err != nil {
		return nil, s.ended(id, err)
	}
	return s.message(sb), nil
}

func (s *Server) start(ctx context.Context, who caller, req *dsecv1.StartRequest) (proto.Message, error) {
	sb, err := s.changed(ctx, who, req.Id, func(id dsec.SandboxID) (node.Sandbox, error) {
		return s.cfg.Service.Start(ctx, id, req.CallId)
	})
	return &dsecv1.StartResponse{Sandbox: sb}, err
}

func (s *Server) stop(ctx context.Context, who caller, req *dsecv1.StopRequest) (proto.Message, error) {
	cause := dsec.Cause(req.Cause)
	if cause == "" {
		cause = dsec.CauseCompleted
	}
	sb, err := s.changed(ctx, who, req.Id, func(id dsec.SandboxID) (node.Sandbox, error) {
		return s.cfg.Service.Stop(ctx, id, cause, req.CallId)
	})
	return &dsecv1.StopResponse{Sandbox: sb}, err
}

func (s *Server) delete(ctx context.Context, who caller, req *dsecv1.DeleteRequest) (proto.Message, error) {
	id, err := s.own(ctx, who, req.Id)
	if err != nil {
		return nil, err
	}
	existed, err := s.cfg.Service.Delete(ctx, id, req.CallId)
	return &dsecv1.DeleteResponse{Existed: existed}, err
}

func (s *Server) pause(ctx context.Context, who caller, req *dsecv1.PauseRequest) (proto.Message, error) {
	sb, err := s.changed(ctx, who, req.Id, func(id dsec.SandboxID) (node.Sandbox, error) {
		if req.ToDisk {
			return s.cfg.Service.Suspend(ctx, id, req.CallId)
		}
		return s.cfg.Service.Pause(ctx, id, req.CallId)
	})
	return &dsecv1.PauseResponse{Sandbox: sb}, err
}

func (s *Server) resume(ctx context.Context, who caller, req *dsecv1.ResumeRequest) (proto.Message, error) {
	sb, err := s.changed(ctx, who, req.Id, func(id dsec.SandboxID) (node.Sandbox, error) {
		return s.cfg.Service.Resume(ctx, id, req.CallId)
	})
	return &dsecv1.ResumeResponse{Sandbox: sb}, err
}

func (s *Server) fork(ctx context.Context, who caller, req *dsecv1.ForkRequest) (proto.Message, error) {
	id, err := s.own(ctx, who, req.Id)
	if err != nil {
		return nil, err
	}
	all, err := s.cfg.Service.Fork(ctx, id, int(req.Count), req.CallId)
	if err != nil {
		return nil, s.ended(id, err)
	}
	resp := &dsecv1.ForkResponse{}
	for _, sb := range all {
		resp.Sandboxes = append(resp.Sandboxes, s.message(sb))
	}
	return resp, nil
}

func (s *Server) renew(ctx context.Context, who caller, req *dsecv1.RenewRequest) (proto.Message, error) {
	sb, err := s.changed(ctx, who, req.Id, func(id dsec.SandboxID) (node.Sandbox, error) {
		return s.cfg.Service.Renew(ctx, id, wire.Duration(req.Lifetime), req.CallId)
	})
	return &dsecv1.RenewResponse{Sandbox: sb}, err
}

func (s *Server) setNetwork(ctx context.Context, who caller, req *dsecv1.SetNetworkRequest) (proto.Message, error) {
	sb, err := s.changed(ctx, who, req.Id, func(id dsec.SandboxID) (node.Sandbox, error) {
		return s.cfg.Service.SetNetwork(ctx, id, wire.PolicyFrom(req), req.CallId)
	})
	return &dsecv1.SetNetworkResponse{Sandbox: sb}, err
}

func (s *Server) egress(ctx context.Context, who caller, req *dsecv1.EgressRequest) (proto.Message, error) {
	id, err := s.own(ctx, who, req.Id)
	if err != nil {
		return nil, err
	}
	e, err := s.cfg.Service.Egress(ctx, id)
	if err != nil {
		return nil, s.ended(id, err)
	}
	return wire.Egress(e), nil
}

func (s *Server) setPhase(ctx context.Context, who caller, req *dsecv1.SetPhaseRequest) (proto.Message, error) {
	sb, err := s.changed(ctx, who, req.Id, func(id dsec.SandboxID) (node.Sandbox, error) {
		return s.cfg.Service.SetPhase(ctx, id, req.Name, req.CallId)
	})
	return &dsecv1.SetPhaseResponse{Sandbox: sb}, err
}

func (s *Server) commit(ctx context.Context, who caller, req *dsecv1.CommitRequest) (proto.Message, error) {
	id, err := s.own(ctx, who, req.Id)
	if err != nil {
		return nil, err
	}
	if s.cfg.Layers != nil && req.Tag != "" {
		if err := s.cfg.Layers.For(who.project).MayTag(ctx, dsec.LayerRef(req.Tag)); err != nil {
			return nil, err // before the work is done for it
		}
	}
	packed, err := s.cfg.Service.Commit(ctx, id, layer.Tag{Name: req.Tag, Project: who.project}, wire.ScrubFrom(req.Scrub), req.CallId)
	if err != nil {
		return nil, s.ended(id, err)
	}
	return wire.Packed(packed), nil
}

func (s *Server) changes(ctx context.Context, who caller, req *dsecv1.ChangesRequest) (proto.Message, error) {
	id, err := s.own(ctx, who, req.Id)
	if err != nil {
		return nil, err
	}
	c, err := s.cfg.Inside.Changes(ctx, id, int(req.Most))
	if err != nil {
		return nil, s.ended(id, err)
	}
	return wire.Changes(c), nil
}

func (s *Server) grade(ctx context.Context, who caller, req *dsecv1.GradeRequest) (proto.Message, error) {
	id, err := s.own(ctx, who, req.Id)
	if err != nil {
		return nil, err
	}
	res, err := s.cfg.Service.Grade(ctx, id, wire.GradeSpecFrom(req), req.CallId)
	if err != nil {
		return nil, s.ended(id, err)
	}
	return wire.Grade(res), nil
}

func (s *Server) stats(ctx context.Context, who caller, req *dsecv1.StatsRequest) (proto.Message, error) {
	id, err := s.own(ctx, who, req.Id)
	if err != nil {
		return nil, err
	}
	st, err := s.cfg.Inside.Stats(ctx, id)
	if err != nil {
		return nil, s.ended(id, err)
	}
	return wire.Stats(st), nil
}

func (s *Server) doctor(ctx context.Context, _ caller, _ *dsecv1.DoctorRequest) (proto.Message, error) {
	if s.cfg.Doctor == nil {
		return nil, dsec.Errorf(dsec.Unsupported, "examine node", string(s.cfg.Node), "this agent has no doctor")
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	return &dsecv1.DoctorResponse{Node: string(s.cfg.Node), Reports: wire.Reports(s.cfg.Doctor(ctx))}, nil
}

package nodeapi

import (
	"context"

	"google.golang.org/protobuf/proto"

	dsecv1 "github.com/opendsec/dsec/api/dsec/v1"
	"github.com/opendsec/dsec/api/wire"
)

func (s *Server) checkpoint(ctx context.Context, who caller, req *dsecv1.CheckpointRequest) (proto.Message, error) {
	id, err := s.own(ctx, who, req.Id)
	if err != nil {
		return nil, err
	}
	c, err := s.cfg.Service.Checkpoint(ctx, id, wire.Duration(req.Keep), req.CallId)
	if err != nil {
		return nil, s.ended(id, err)
	}
	return wire.Checkpoint(c), nil
}

func (s *Server) findCheckpoint(ctx context.Context, who caller, req *dsecv1.FindCheckpointRequest) (proto.Message, error) {
	c, err := s.cfg.Service.FindCheckpoint(ctx, who.project, req.Digest)
	if err != nil {
		return nil, err
	}
	return wire.Checkpoint(c), nil
}

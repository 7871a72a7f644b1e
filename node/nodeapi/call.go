package nodeapi

import (
	"context"

	"google.golang.org/protobuf/proto"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/api/dsec/v1"
	"github.com/opendsec/dsec/api/wire"
)

func (s *Server) callFunction(ctx context.Context, who caller, req *dsecv1.CallRequest) (proto.Message, error) {
	if s.cfg.Caller == nil {
		return nil, dsec.Errorf(dsec.Unsupported, "call", string(s.cfg.Node), "this node has no function tier")
	}
	res, err := s.cfg.Caller.Call(ctx, who.project, wire.CallFrom(req))
	if err != nil {
		return nil, err
	}
	return wire.CallResult(res), nil
}

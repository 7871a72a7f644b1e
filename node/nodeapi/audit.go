package nodeapi

import (
	"context"
	"net/http"

	"google.golang.org/protobuf/proto"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/api/dsec/v1"
	"github.com/opendsec/dsec/api/wire"
)

// serveAudit shows the evidence of what a sandbox did, and goes on if asked to.
func (s *Server) serveAudit(w http.ResponseWriter, r *http.Request) {
	s.raw(func(w http.ResponseWriter, r *http.Request) error {
		req := &dsecv1.AuditRequest{}
		if err := request(w, r, req); err != nil {
			return err
		}
		id, err := s.own(r.Context(), who(r), req.Id)
		if err != nil {
			return err
		}
		if s.cfg.Auditor == nil {
			return dsec.Errorf(dsec.Unsupported, "read audit log", req.Id, "this node keeps none")
		}
		return s.push(w, r, func(ctx context.Context, send func(proto.Message) error) error {
			return s.cfg.Auditor.Audit(ctx, id, wire.AuditFilterFrom(req), func(r dsec.AuditRecord) error {
				return send(&dsecv1.AuditResponse{Record: wire.Audit(r)})
			})
		})
	})(w, r)
}

func (s *Server) findings(ctx context.Context, who caller, req *dsecv1.FindingsRequest) (proto.Message, error) {
	id, err := s.own(ctx, who, req.Id)
	if err != nil {
		return nil, err
	}
	if s.cfg.Auditor == nil {
		return nil, dsec.Errorf(dsec.Unsupported, "look for reward hacks in", req.Id, "this node keeps no evidence")
	}
	all, err := s.cfg.Auditor.Findings(ctx, id, wire.HackTaskFrom(req))
	if err != nil {
		return nil, err
	}
	return wire.Findings(all), nil
}

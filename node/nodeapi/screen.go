package nodeapi

import (
	"context"
	"maps"

	"google.golang.org/protobuf/proto"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/api/dsec/v1"
	"github.com/opendsec/dsec/api/wire"
	"github.com/opendsec/dsec/node"
)

// screenVerbs are those of sandboxes that are machines.
func (s *Server) screenVerbs(into map[string]verb) map[string]verb {
	maps.Copy(into, map[string]verb{
		wire.VerbScreenshot: unary(s.screenshot),
		wire.VerbAct:        once(s, wire.VerbAct, s.act),
		wire.VerbConsole:    unary(s.console),
		wire.VerbPower:      once(s, wire.VerbPower, s.power),
		wire.VerbMark:       once(s, wire.VerbMark, s.mark),
		wire.VerbRevert:     once(s, wire.VerbRevert, s.revert),
		wire.VerbMarks:      unary(s.marks),
	})
	return into
}

// screened runs f on the node of a sandbox of the caller's.
func (s *Server) screened(ctx context.Context, who caller, sandbox string, f func(n node.Screens, id dsec.SandboxID) error) error {
	id, err := s.own(ctx, who, sandbox)
	if err != nil {
		return err
	}
	n, ok := s.cfg.Service.(node.Screens)
	if !ok {
		return dsec.Errorf(dsec.Unsupported, "reach screen", sandbox, "this node has no machines")
	}
	if err := f(n, id); err != nil {
		return s.ended(id, err)
	}
	return nil
}

func (s *Server) screenshot(ctx context.Context, who caller, req *dsecv1.ScreenshotRequest) (resp proto.Message, err error) {
	err = s.screened(ctx, who, req.Id, func(n node.Screens, id dsec.SandboxID) error {
		p, err := n.Screenshot(ctx, id, wire.RegionFrom(req.Region))
		resp = wire.Picture(p)
		return err
	})
	return resp, err
}

func (s *Server) act(ctx context.Context, who caller, req *dsecv1.ActRequest) (proto.Message, error) {
	return &dsecv1.ActResponse{}, s.screened(ctx, who, req.Id, func(n node.Screens, id dsec.SandboxID) error {
		return n.Act(ctx, id, wire.ActionsFrom(req.Actions))
	})
}

func (s *Server) console(ctx context.Context, who caller, req *dsecv1.ConsoleRequest) (resp proto.Message, err error) {
	err = s.screened(ctx, who, req.Id, func(n node.Screens, id dsec.SandboxID) error {
		text, err := n.Console(ctx, id)
		resp = &dsecv1.ConsoleResponse{Text: text}
		return err
	})
	return resp, err
}

func (s *Server) power(ctx context.Context, who caller, req *dsecv1.PowerRequest) (proto.Message, error) {
	return &dsecv1.PowerResponse{}, s.screened(ctx, who, req.Id, func(n node.Screens, id dsec.SandboxID) error {
		return n.Power(ctx, id, dsec.Power(req.Power))
	})
}

func (s *Server) mark(ctx context.Context, who caller, req *dsecv1.MarkRequest) (proto.Message, error) {
	return &dsecv1.MarkResponse{}, s.screened(ctx, who, req.Id, func(n node.Screens, id dsec.SandboxID) error { return n.Mark(ctx, id, req.Name) })
}

func (s *Server) revert(ctx context.Context, who caller, req *dsecv1.RevertRequest) (proto.Message, error) {
	return &dsecv1.RevertResponse{}, s.screened(ctx, who, req.Id, func(n node.Screens, id dsec.SandboxID) error { return n.Revert(ctx, id, req.Name) })
}

func (s *Server) marks(ctx context.Context, who caller, req *dsecv1.MarksRequest) (resp proto.Message, err error) {
	err = s.screened(ctx, who, req.Id, func(n node.Screens, id dsec.SandboxID) error {
		names, err := n.Marks(ctx, id)
		resp = &dsecv1.MarksResponse{Names: names}
		return err
	})
	return resp, err
}

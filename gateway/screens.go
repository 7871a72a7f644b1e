package gateway

import (
	"context"

	dsecv1 "github.com/opendsec/dsec/api/dsec/v1"
	"github.com/opendsec/dsec/api/wire"
)

// screens is the service of that name.
type screens struct{ *Gateway }

func (s *screens) Screenshot(ctx context.Context, req *dsecv1.ScreenshotRequest) (*dsecv1.ScreenshotResponse, error) {
	resp := &dsecv1.ScreenshotResponse{}
	return resp, s.on(ctx, req.Id, wire.VerbScreenshot, req, resp)
}

func (s *screens) Act(ctx context.Context, req *dsecv1.ActRequest) (*dsecv1.ActResponse, error) {
	resp := &dsecv1.ActResponse{}
	return resp, s.on(ctx, req.Id, wire.VerbAct, req, resp)
}

func (s *screens) Console(ctx context.Context, req *dsecv1.ConsoleRequest) (*dsecv1.ConsoleResponse, error) {
	resp := &dsecv1.ConsoleResponse{}
	return resp, s.on(ctx, req.Id, wire.VerbConsole, req, resp)
}

func (s *screens) Power(ctx context.Context, req *dsecv1.PowerRequest) (*dsecv1.PowerResponse, error) {
	resp := &dsecv1.PowerResponse{}
	return resp, s.on(ctx, req.Id, wire.VerbPower, req, resp)
}

func (s *screens) Mark(ctx context.Context, req *dsecv1.MarkRequest) (*dsecv1.MarkResponse, error) {
	resp := &dsecv1.MarkResponse{}
	return resp, s.on(ctx, req.Id, wire.VerbMark, req, resp)
}

func (s *screens) Revert(ctx context.Context, req *dsecv1.RevertRequest) (*dsecv1.RevertResponse, error) {
	resp := &dsecv1.RevertResponse{}
	return resp, s.on(ctx, req.Id, wire.VerbRevert, req, resp)
}

func (s *screens) Marks(ctx context.Context, req *dsecv1.MarksRequest) (*dsecv1.MarksResponse, error) {
	resp := &dsecv1.MarksResponse{}
	return resp, s.on(ctx, req.Id, wire.VerbMarks, req, resp)
}

package gateway

import (
	"context"

	"connectrpc.com/connect"

	dsecv1 "github.com/opendsec/dsec/api/dsec/v1"
	"github.com/opendsec/dsec/api/wire"
)

// fileService is the service Files.
type fileService struct{ *Gateway }

func (f *fileService) Stat(ctx context.Context, req *dsecv1.StatRequest) (*dsecv1.StatResponse, error) {
	resp := &dsecv1.StatResponse{}
	return resp, f.on(ctx, req.Sandbox, wire.VerbStat, req, resp)
}

func (f *fileService) List(ctx context.Context, req *dsecv1.ListFilesRequest) (*dsecv1.ListFilesResponse, error) {
	resp := &dsecv1.ListFilesResponse{}
	return resp, f.on(ctx, req.Sandbox, wire.VerbListFiles, req, resp)
}

func (f *fileService) Mkdir(ctx context.Context, req *dsecv1.MkdirRequest) (*dsecv1.MkdirResponse, error) {
	resp := &dsecv1.MkdirResponse{}
	return resp, f.on(ctx, req.Sandbox, wire.VerbMkdir, req, resp)
}

func (f *fileService) Move(ctx context.Context, req *dsecv1.MoveRequest) (*dsecv1.MoveResponse, error) {
	resp := &dsecv1.MoveResponse{}
	return resp, f.on(ctx, req.Sandbox, wire.VerbMove, req, resp)
}

func (f *fileService) Remove(ctx context.Context, req *dsecv1.RemoveFileRequest) (*dsecv1.RemoveFileResponse, error) {
	resp := &dsecv1.RemoveFileResponse{}
	return resp, f.on(ctx, req.Sandbox, wire.VerbRemove, req, resp)
}

func (f *fileService) SetAttr(ctx context.Context, req *dsecv1.SetAttrRequest) (*dsecv1.SetAttrResponse, error) {
	resp := &dsecv1.SetAttrResponse{}
	return resp, f.on(ctx, req.Sandbox, wire.VerbSetAttr, req, resp)
}

func (f *fileService) Watch(ctx context.Context, req *dsecv1.WatchRequest, stream *connect.ServerStream[dsecv1.WatchResponse]) error {
	r, closer, err := f.open(ctx, req.Sandbox, wire.PathWatch, req)
	if err != nil {
		return err
	}
	defer closer.Close()
	return relay(r, closer, func() *dsecv1.WatchResponse { return &dsecv1.WatchResponse{} }, stream.Send,
		&dsecv1.WatchResponse{})
}

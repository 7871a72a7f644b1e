package nodeapi

import (
	"context"

	"google.golang.org/protobuf/proto"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/api/dsec/v1"
	"github.com/opendsec/dsec/api/wire"
	"github.com/opendsec/dsec/files"
)

// fs opens the file service of a sandbox as a user.
func (s *Server) fs(ctx context.Context, who caller, sandbox, user string) (dsec.SandboxID, files.FS, error) {
	id, err := s.own(ctx, who, sandbox)
	if err != nil {
		return "", nil, err
	}
	fs, err := s.cfg.Inside.Files(ctx, id, user)
	if err != nil {
		return "", nil, s.ended(id, err)
	}
	return id, fs, nil
}

func (s *Server) stat(ctx context.Context, who caller, req *dsecv1.StatRequest) (proto.Message, error) {
	id, fs, err := s.fs(ctx, who, req.Sandbox, req.User)
	if err != nil {
		return nil, err
	}
	info, err := fs.Stat(ctx, req.Path, req.Follow)
	if err != nil {
		return nil, s.ended(id, err)
	}
	return &dsecv1.StatResponse{Info: wire.FileInfo(info)}, nil
}

func (s *Server) listFiles(ctx context.Context, who caller, req *dsecv1.ListFilesRequest) (proto.Message, error) {
	id, fs, err := s.fs(ctx, who, req.Sandbox, req.User)
	if err != nil {
		return nil, err
	}
	entries, err := fs.List(ctx, req.Path, max(1, int(req.Depth)))
	if err != nil {
		return nil, s.ended(id, err)
	}
	resp := &dsecv1.ListFilesResponse{}
	for _, e := range entries {
		resp.Entries = append(resp.Entries, wire.FileInfo(e))
	}
	return resp, nil
}

func (s *Server) mkdir(ctx context.Context, who caller, req *dsecv1.MkdirRequest) (proto.Message, error) {
	id, fs, err := s.fs(ctx, who, req.Sandbox, req.User)
	if err != nil {
		return nil, err
	}
	mode := req.Mode
	if mode == 0 {
		mode = 0o755
	}
	return &dsecv1.MkdirResponse{}, s.ended(id, fs.Mkdir(ctx, req.Path, mode, req.Parents))
}

func (s *Server) move(ctx context.Context, who caller, req *dsecv1.MoveRequest) (proto.Message, error) {
	id, fs, err := s.fs(ctx, who, req.Sandbox, req.User)
	if err != nil {
		return nil, err
	}
	return &dsecv1.MoveResponse{}, s.ended(id, fs.Move(ctx, req.From, req.To))
}

func (s *Server) remove(ctx context.Context, who caller, req *dsecv1.RemoveFileRequest) (proto.Message, error) {
	id, fs, err := s.fs(ctx, who, req.Sandbox, req.User)
	if err != nil {
		return nil, err
	}
	return &dsecv1.RemoveFileResponse{}, s.ended(id, fs.Remove(ctx, req.Path, req.Recursive))
}

func (s *Server) setAttr(ctx context.Context, who caller, req *dsecv1.SetAttrRequest) (proto.Message, error) {
	id, fs, err := s.fs(ctx, who, req.Sandbox, req.User)
	if err != nil {
		return nil, err
	}
	a := files.Attr{Mode: req.Mode, UID: req.Uid, GID: req.Gid}
	if req.Mtime != nil {
		t := wire.Instant(req.Mtime)
		a.MTime = &t
	}
	return &dsecv1.SetAttrResponse{}, s.ended(id, fs.SetAttr(ctx, req.Path, a))
}

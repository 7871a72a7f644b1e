package nodeapi

import (
	"bufio"
	"context"
	"net/http"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/proto"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/api/dsec/v1"
	"github.com/opendsec/dsec/api/wire"
	"github.com/opendsec/dsec/layer"
)

// serveEnsure makes images known, side by side, and answers with the progress of
// each and, last of each, its stack. The first error ends it.
func (s *Server) serveEnsure(w http.ResponseWriter, r *http.Request) {
	s.raw(func(w http.ResponseWriter, r *http.Request) error {
		req := &dsecv1.EnsureRequest{}
		if err := request(w, r, req); err != nil {
			return err
		}
		store, err := s.store(who(r))
		if err != nil {
			return err
		}
		return s.push(w, r, func(ctx context.Context, send func(proto.Message) error) error {
			g, gctx := errgroup.WithContext(ctx)
			for _, ref := range req.Refs {
				g.Go(func() error { return ensureOne(gctx, store, req, ref, send) })
			}
			return g.Wait()
		})
	})(w, r)
}

func ensureOne(ctx context.Context, store Layers, req *dsecv1.EnsureRequest, ref string, send func(proto.Message) error) error {
	in := Ensure{Ref: ref, Arch: req.Arch, MaxAge: time.Duration(req.MaxAgeMs) * time.Millisecond}
	l, err := store.Ensure(ctx, in, func(p layer.Progress) {
		_ = send(&dsecv1.EnsureResponse{Ref: ref, Phase: p.Phase, Done: p.Done, Total: p.Total, // a caller that left is seen through ctx
			Queue: int32(p.Queue), LeftMs: p.Left.Milliseconds()})
	})
	if err != nil {
		return err
	}
	return send(&dsecv1.EnsureResponse{Ref: ref, Phase: "ready", Layer: wire.Layer(l.Info, l.Tags)})
}

func (s *Server) template(ctx context.Context, who caller, req *dsecv1.TemplateRequest) (proto.Message, error) {
	store, err := s.store(who)
	if err != nil {
		return nil, err
	}
	t := Template{Name: req.Tag, Image: dsec.LayerRef(req.Image), Workspace: dsec.LayerRef(req.Workspace), Toolkits: refs(req.Toolkits), CallID: req.CallId}
	if len(t.Toolkits) > dsec.MaxLayers {
		return nil, dsec.Errorf(dsec.Invalid, "create template", req.Tag, "%d toolkits, at most %d", len(t.Toolkits), dsec.MaxLayers)
	}
	l, err := store.Template(ctx, t)
	if err != nil {
		return nil, err
	}
	return &dsecv1.TemplateResponse{Layer: wire.Layer(l.Info, l.Tags)}, nil
}

func refs(names []string) (out []dsec.LayerRef) {
	for _, n := range names {
		out = append(out, dsec.LayerRef(n))
	}
	return out
}

func (s *Server) merge(ctx context.Context, who caller, req *dsecv1.MergeRequest) (proto.Message, error) {
	store, err := s.store(who)
	if err != nil {
		return nil, err
	}
	all, err := store.Merge(ctx, refs(req.Refs), req.DryRun)
	if err != nil {
		return nil, err
	}
	resp := &dsecv1.MergeResponse{}
	for _, m := range all {
		p := &dsecv1.Merged{Layer: string(m.Layer), Images: m.Images, Before: m.Before, After: m.After}
		for _, d := range m.Layers {
			p.Layers = append(p.Layers, string(d))
		}
		resp.Merged = append(resp.Merged, p)
	}
	return resp, nil
}

// exportImage answers with an OCI image archive.
func (s *Server) exportImage(w http.ResponseWriter, r *http.Request) error {
	store, err := s.store(who(r))
	if err != nil {
		return err
	}
	q := parameters(r)
	if q.err != nil {
		return q.err
	}
	f := newFramed(w)
	buf := bufio.NewWriterSize(f, copyBuffer)
	err = store.Export(r.Context(), dsec.LayerRef(q.v.Get("ref")), buf)
	if err == nil {
		err = buf.Flush()
	}
	return f.end(s.closing(err))
}

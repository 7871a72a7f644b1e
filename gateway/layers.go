package gateway

import (
	"context"
	"net/http"
	"net/url"
	"regexp"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/api/dsec/v1"
	"github.com/opendsec/dsec/api/wire"
	"github.com/opendsec/dsec/iam"
)

// layers is the service of that name. The store is the node's; with several
// nodes the first that is alive imports.
type layers struct{ *Gateway }

func (g *Gateway) layerNode() (dsec.NodeID, error) {
	for _, n := range g.cfg.Cluster.Nodes() {
		if n.Alive {
			return dsec.NodeID(n.Id), nil
		}
	}
	return "", dsec.Errorf(dsec.Unavailable, "find node", "", "no node is alive")
}

// registryRef is what a caller may name who is no admin: something in a
// registry, nothing on the server's disk.
var registryRef = regexp.MustCompile(`^[a-zA-Z0-9][a-zA-Z0-9._:-]*(/[a-zA-Z0-9._-]+)*(:[a-zA-Z0-9._-]+)?(@sha256:[0-9a-f]{64})?$`)

var schemes = regexp.MustCompile(`^[a-z-]+:(/|\.)`)

// maySource: paths on the server are for admins.
func maySource(ctx context.Context, source string) error {
	if source == "" || len(source) > 4096 {
		return dsec.Errorf(dsec.Invalid, "import", dsec.Quote(source), "source has %d bytes", len(source))
	}
	if principal(ctx).Role == iam.Admin || registryRef.MatchString(source) && !schemes.MatchString(source) {
		return nil
	}
	return dsec.Errorf(dsec.PermissionDenied, "import", dsec.Quote(source), "paths on the server need the role admin; upload a tar instead")
}

func (l *layers) Import(ctx context.Context, req *dsecv1.ImportRequest, stream *connect.ServerStream[dsecv1.ImportResponse]) error {
	return l.make(ctx, req.Source, wire.PathImport, req, stream)
}

func (l *layers) Build(ctx context.Context, req *dsecv1.BuildRequest, stream *connect.ServerStream[dsecv1.ImportResponse]) error {
	return l.make(ctx, req.Source, wire.PathBuild, req, stream)
}

// Repack is like Build of what is in the store.
func (l *layers) Repack(ctx context.Context, req *dsecv1.RepackRequest, stream *connect.ServerStream[dsecv1.ImportResponse]) error {
	return l.stream(ctx, wire.PathRepack, req, stream)
}

func (l *layers) Trace(ctx context.Context, req *dsecv1.LayerTraceRequest) (*dsecv1.LayerTraceResponse, error) {
	resp := &dsecv1.LayerTraceResponse{}
	return resp, l.ask(ctx, wire.VerbTrace, req, resp)
}

// Evict makes others wait for what they had.
func (l *layers) Evict(ctx context.Context, req *dsecv1.EvictRequest) (*dsecv1.EvictResponse, error) {
	if err := admin(ctx, "evict layer"); err != nil {
		return nil, err
	}
	resp := &dsecv1.EvictResponse{}
	return resp, l.ask(ctx, wire.VerbEvict, req, resp)
}

func (l *layers) OnDemand(ctx context.Context, req *dsecv1.OnDemandRequest) (*dsecv1.OnDemandResponse, error) {
	resp := &dsecv1.OnDemandResponse{}
	return resp, l.ask(ctx, wire.VerbOnDemand, req, resp)
}

func (l *layers) make(ctx context.Context, source, path string, req proto.Message, stream *connect.ServerStream[dsecv1.ImportResponse]) error {
	if err := maySource(ctx, source); err != nil {
		return err
	}
	return l.stream(ctx, path, req, stream)
}

func (l *layers) stream(ctx context.Context, path string, req proto.Message, stream *connect.ServerStream[dsecv1.ImportResponse]) error {
	return relayFrom(ctx, l, path, req, func() *dsecv1.ImportResponse { return &dsecv1.ImportResponse{} }, stream.Send)
}

// relayFrom passes on what the node that has the store answers to one call.
func relayFrom[M proto.Message](ctx context.Context, l *layers, path string, req proto.Message, fresh func() M, send func(M) error) error {
	node, err := l.layerNode()
	if err != nil {
		return err
	}
	ctx, cancel := within(ctx, commitWithin)
	defer cancel()
	r, closer, err := l.cfg.Cluster.Stream(ctx, node, path, scope(ctx), req)
	if err != nil {
		return err
	}
	defer closer.Close()
	return relay(r, closer, fresh, send, fresh())
}

// ask does one call on the node that has the store.
func (l *layers) ask(ctx context.Context, verb string, req, resp proto.Message) error {
	node, err := l.layerNode()
	if err != nil {
		return err
	}
	return l.cfg.Cluster.Call(ctx, node, verb, scope(ctx), req, resp)
}

func (l *layers) List(ctx context.Context, req *dsecv1.ListLayersRequest) (*dsecv1.ListLayersResponse, error) {
	resp := &dsecv1.ListLayersResponse{}
	return resp, l.ask(ctx, wire.VerbLayers, req, resp)
}

func (l *layers) Inspect(ctx context.Context, req *dsecv1.InspectRequest) (*dsecv1.InspectResponse, error) {
	resp := &dsecv1.InspectResponse{}
	return resp, l.ask(ctx, wire.VerbInspect, req, resp)
}

// Remove may take a layer away from every project.
func (l *layers) Remove(ctx context.Context, req *dsecv1.RemoveLayerRequest) (*dsecv1.RemoveLayerResponse, error) {
	if err := admin(ctx, "remove layer"); err != nil {
		return nil, err
	}
	resp := &dsecv1.RemoveLayerResponse{}
	return resp, l.ask(ctx, wire.VerbRemoveRef, req, resp)
}

// maxRefs bounds the references of one call.
const maxRefs = 256

func (l *layers) Ensure(ctx context.Context, req *dsecv1.EnsureRequest, stream *connect.ServerStream[dsecv1.EnsureResponse]) error {
	if len(req.Refs) == 0 || len(req.Refs) > maxRefs {
		return dsec.Errorf(dsec.Invalid, "ensure images", "refs", "%d references, want 1 to %d", len(req.Refs), maxRefs)
	}
	for _, ref := range req.Refs {
		if !registryRef.MatchString(ref) || schemes.MatchString(ref) || len(ref) > 4096 {
			return dsec.Errorf(dsec.Invalid, "ensure images", dsec.Quote(ref), "not a reference to a registry")
		}
	}
	return relayFrom(ctx, l, wire.PathEnsure, req, func() *dsecv1.EnsureResponse { return &dsecv1.EnsureResponse{} }, stream.Send)
}

func (l *layers) CreateTemplate(ctx context.Context, req *dsecv1.TemplateRequest) (*dsecv1.TemplateResponse, error) {
	resp := &dsecv1.TemplateResponse{}
	return resp, l.ask(ctx, wire.VerbTemplate, req, resp)
}

// Merge changes what names of every project mean, though not what they show.
func (l *layers) Merge(ctx context.Context, req *dsecv1.MergeRequest) (*dsecv1.MergeResponse, error) {
	if err := admin(ctx, "merge layers"); err != nil {
		return nil, err
	}
	resp := &dsecv1.MergeResponse{}
	return resp, l.ask(ctx, wire.VerbMerge, req, resp)
}

// exportImage answers with an OCI image archive.
func (g *Gateway) exportImage(w http.ResponseWriter, r *http.Request) error {
	if err := wire.CheckQuery(r.URL.Query()); err != nil {
		return err
	}
	node, err := g.layerNode()
	if err != nil {
		return err
	}
	return g.pass(w, r, node, wire.PathExport+"?"+url.Values{"ref": {r.URL.Query().Get("ref")}}.Encode())
}

// Tag is for tags of the caller's project, which the store checks, as it does
// for every call that makes one.
func (l *layers) Tag(ctx context.Context, req *dsecv1.TagRequest) (*dsecv1.TagResponse, error) {
	resp := &dsecv1.TagResponse{}
	return resp, l.ask(ctx, wire.VerbTag, req, resp)
}

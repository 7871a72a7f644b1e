package gateway

import (
	"context"
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

func (l *layers) make(ctx context.Context, source, path string, req proto.Message, stream *connect.ServerStream[dsecv1.ImportResponse]) error {
	if err := maySource(ctx, source); err != nil {
		return err
	}
	return l.stream(ctx, path, req, stream)
}

func (l *layers) stream(ctx context.Context, path string, req proto.Message, stream *connect.ServerStream[dsecv1.ImportResponse]) error {
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
	return relay(r, closer, func() *dsecv1.ImportResponse { return &dsecv1.ImportResponse{} }, stream.Send,
		&dsecv1.ImportResponse{})
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

// Tag is for tags of the caller's project, which the store checks, as it does
// for every call that makes one.
func (l *layers) Tag(ctx context.Context, req *dsecv1.TagRequest) (*dsecv1.TagResponse, error) {
	resp := &dsecv1.TagResponse{}
	return resp, l.ask(ctx, wire.VerbTag, req, resp)
}

package nodeapi

import (
	"context"
	"io"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/api/dsec/v1"
	"github.com/opendsec/dsec/api/wire"
	"github.com/opendsec/dsec/layer"
)

// Layers is what a node offers of its layer store and image conversion.
// Errors are *dsec.Error; the same CallID gives the same layer.
type Layers interface {
	// For is what a project sees and may do, see layer.Tag; "" everything.
	For(project string) Layers
	// MayTag says whether a tag may be made or moved: PermissionDenied if not.
	MayTag(ctx context.Context, tag dsec.LayerRef) error
	// Import makes a layer of an image, Build one of a tree.
	Import(ctx context.Context, r Import, progress func(Progress)) (Layer, error)
	Build(ctx context.Context, r Build, progress func(Progress)) (Layer, error)
	List(ctx context.Context) ([]Layer, error)
	Inspect(ctx context.Context, ref dsec.LayerRef) (Layer, error)
	// Remove drops a tag, or a layer nobody uses; IllegalState if somebody does.
	Remove(ctx context.Context, ref dsec.LayerRef) (existed bool, err error)
	Tag(ctx context.Context, ref, tag dsec.LayerRef) error
	Composing
}

// Composing is what a node offers of images made of several layers.
type Composing interface {
	// Ensure makes the image of an OCI reference known. progress may be nil.
	Ensure(ctx context.Context, r Ensure, progress func(layer.Progress)) (Layer, error)
	// Template binds a name to what its parts mean now.
	Template(ctx context.Context, t Template) (Layer, error)
	// Merge makes one layer of what images have in common at the bottom: of those
	// named, or, without names, wherever two have. With dry it only says so.
	Merge(ctx context.Context, refs []dsec.LayerRef, dry bool) ([]Merged, error)
	// Export writes an OCI image archive.
	Export(ctx context.Context, ref dsec.LayerRef, w io.Writer) error
}

// Ensure describes an image to make known.
type Ensure struct {
	Ref    string
	Arch   string        // "": this machine's
	MaxAge time.Duration // what the reference meant so long ago will do
}

// Template describes a template.
type Template struct {
	Name      string
	Image     dsec.LayerRef
	Workspace dsec.LayerRef // "": none
	Toolkits  []dsec.LayerRef
	CallID    string
}

// Merged is what became of layers that images have in common.
type Merged struct {
	Layers        []layer.Digest
	Layer         layer.Digest // "" in a dry run
	Images        []string
	Before, After int64 // bytes
}

// Layer is a layer and the tags that point to it.
type Layer struct {
	layer.Info
	Tags []string
}

// Import describes an import.
type Import struct {
	Source string    // an OCI reference or a host path; what Tar is, for people
	Tar    io.Reader // an image archive or a root file system; nil: Source
	Tag    string
	Arch   string // "": this machine's
	CallID string
}

// Build describes a build.
type Build struct {
	Source string    // a host path or an OCI reference; what Tar is, for people
	Tar    io.Reader // the tree; nil: Source
	Tag    string
	At     string // where the tree is placed; "": "/"
	Owner  string // "uid[:gid]" of everything; "": as in the source
	CallID string
}

// Progress of an import or build.
type Progress struct {
	Phase       string // resolve, fetch, convert, store
	Done, Total int64  // bytes; Total 0: unknown
}

// store as a caller sees it.
func (s *Server) store(who caller) (Layers, error) {
	if s.cfg.Layers == nil {
		return nil, dsec.Errorf(dsec.Unsupported, "open layers", string(s.cfg.Node), "this agent has no layer store")
	}
	return s.cfg.Layers.For(who.project), nil
}

func (s *Server) layers(ctx context.Context, who caller, _ *dsecv1.ListLayersRequest) (proto.Message, error) {
	store, err := s.store(who)
	if err != nil {
		return nil, err
	}
	list, err := store.List(ctx)
	if err != nil {
		return nil, err
	}
	resp := &dsecv1.ListLayersResponse{}
	for _, l := range list {
		resp.Layers = append(resp.Layers, wire.Layer(l.Info, l.Tags))
	}
	return resp, nil
}

func (s *Server) inspectLayer(ctx context.Context, who caller, req *dsecv1.InspectRequest) (proto.Message, error) {
	store, err := s.store(who)
	if err != nil {
		return nil, err
	}
	l, err := store.Inspect(ctx, dsec.LayerRef(req.Ref))
	if err != nil {
		return nil, err
	}
	return &dsecv1.InspectResponse{Layer: wire.Layer(l.Info, l.Tags)}, nil
}

func (s *Server) removeLayer(ctx context.Context, who caller, req *dsecv1.RemoveLayerRequest) (proto.Message, error) {
	store, err := s.store(who)
	if err != nil {
		return nil, err
	}
	existed, err := store.Remove(ctx, dsec.LayerRef(req.Ref))
	return &dsecv1.RemoveLayerResponse{Existed: existed}, err
}

func (s *Server) tagLayer(ctx context.Context, who caller, req *dsecv1.TagRequest) (proto.Message, error) {
	store, err := s.store(who)
	if err != nil {
		return nil, err
	}
	if err := store.MayTag(ctx, dsec.LayerRef(req.Tag)); err != nil {
		return nil, err
	}
	return &dsecv1.TagResponse{}, store.Tag(ctx, dsec.LayerRef(req.Ref), dsec.LayerRef(req.Tag))
}

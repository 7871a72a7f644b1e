package nodeapi

import (
	"context"
	"io"
	"strings"
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
	// Trace tells what is read first of a layer: NotFound if nobody recorded it.
	Trace(ctx context.Context, ref dsec.LayerRef) (Trace, error)
	// Repack makes a layer of the same tree with its data in the order of the trace.
	Repack(ctx context.Context, r Repack, progress func(Progress)) (Layer, error)
	Demanding
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

// Repack describes a repacking.
type Repack struct {
	Ref    dsec.LayerRef
	Tag    string
	CallID string
}

// Trace is the trace of a layer and the files that it speaks of.
type Trace struct {
	layer.Trace
	DataSize int64
	Files    []TracedFile // in the order in which they are first touched
}

// TracedFile is what the recordings touched of a file.
type TracedFile struct {
	Path              string
	Size              int64
	Touched, Expected int64  // bytes
	Count             uint32 // recordings that touched the part that most did
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

func (s *Server) traceLayer(ctx context.Context, who caller, req *dsecv1.LayerTraceRequest) (proto.Message, error) {
	store, err := s.store(who)
	if err != nil {
		return nil, err
	}
	t, err := store.Trace(ctx, dsec.LayerRef(req.Ref))
	if err != nil {
		return nil, err
	}
	resp := &dsecv1.LayerTraceResponse{Digest: string(t.Layer), DataSize: t.DataSize, Touched: t.Bytes(), Expected: t.ExpectedBytes(),
		Window: t.Window.Seconds(), Recordings: int32(t.Recordings)}
	room := wire.MaxControl // what fits an answer
	for i, f := range t.Files {
		if room -= 3*len(f.Path) + tracedFileSize; room < 0 {
			resp.More = int64(len(t.Files) - i)
			break
		}
		resp.Files = append(resp.Files, &dsecv1.TracedFile{Path: strings.ToValidUTF8(f.Path, "\ufffd"), Size: f.Size, Touched: f.Touched, Expected: f.Expected, Count: int32(f.Count)})
	}
	return resp, nil
}

// tracedFileSize is the most that a TracedFile takes besides its path, encoded. A
// byte of the path that is no UTF-8 becomes three.
const tracedFileSize = 64

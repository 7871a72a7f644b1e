package client

import (
	"context"
	"io"
	"net/http"
	"net/url"
	"time"

	"connectrpc.com/connect"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/api/dsec/v1"
	"github.com/opendsec/dsec/api/wire"
	"github.com/opendsec/dsec/layer"
)

// Layer is a layer and the tags that point to it.
type Layer struct {
	layer.Info
	Tags []string `json:"tags,omitempty"`
}

func layerFrom(p *dsecv1.Layer) Layer {
	info, tags := wire.LayerFrom(p)
	return Layer{info, tags}
}

// Progress of an import or build.
type Progress struct {
	Phase       string
	Done, Total int64 // bytes; Total 0: unknown
}

// Import makes a layer of an image: a reference, or (admins) a path on the
// server. progress may be nil.
func (c *Client) Import(ctx context.Context, source, tag string, progress func(Progress)) (Layer, error) {
	stream, err := c.layers.Import(ctx, &dsecv1.ImportRequest{Source: source, Tag: tag, CallId: newKey()})
	return made("import", source, stream, err, progress)
}

// BuildOptions of a workspace or toolkit layer.
type BuildOptions struct {
	Tag   string
	At    string // where the tree is placed; "" is "/"
	Owner string // "uid[:gid]" of everything; "": as in the source
}

// Build makes a layer of a path on the server or a reference.
func (c *Client) Build(ctx context.Context, source string, o BuildOptions, progress func(Progress)) (Layer, error) {
	stream, err := c.layers.Build(ctx, &dsecv1.BuildRequest{Source: source, Tag: o.Tag, At: o.At, Owner: o.Owner, CallId: newKey()})
	return made("build", source, stream, err, progress)
}

func made(op, source string, stream *connect.ServerStreamForClient[dsecv1.ImportResponse], err error, progress func(Progress)) (Layer, error) {
	if err != nil {
		return Layer{}, wire.FromConnect(op, err)
	}
	defer stream.Close()
	for stream.Receive() {
		m := stream.Msg()
		if m.Layer != nil {
			return layerFrom(m.Layer), nil
		}
		if progress != nil && m.Phase != "" {
			progress(Progress{m.Phase, m.Done, m.Total})
		}
	}
	if err := stream.Err(); err != nil {
		return Layer{}, wire.FromConnect(op, err)
	}
	return Layer{}, dsec.Errorf(dsec.Unavailable, op, source, "the stream ended without a layer")
}

// UploadImage makes a layer of an image archive or root file system tar.
func (c *Client) UploadImage(ctx context.Context, tar io.Reader, tag string) (Layer, error) {
	return c.upload(ctx, tar, url.Values{"kind": {"import"}, "tag": {tag}})
}

// UploadTree makes a workspace or toolkit layer of a tar.
func (c *Client) UploadTree(ctx context.Context, tar io.Reader, o BuildOptions) (Layer, error) {
	return c.upload(ctx, tar, url.Values{"kind": {"build"}, "tag": {o.Tag}, "at": {o.At}, "owner": {o.Owner}})
}

func (c *Client) upload(ctx context.Context, tar io.Reader, q url.Values) (Layer, error) {
	q.Set("call_id", newKey())
	m := &dsecv1.ImportResponse{}
	err := c.put(ctx, "upload layer", http.MethodPost, "/v1/layers/upload?"+q.Encode(), tar, m)
	return layerFrom(m.Layer), err
}

// Layers lists the store.
func (c *Client) Layers(ctx context.Context) ([]Layer, error) {
	resp, err := c.layers.List(ctx, &dsecv1.ListLayersRequest{})
	if err != nil {
		return nil, wire.FromConnect("list layers", err)
	}
	var out []Layer
	for _, l := range resp.Layers {
		out = append(out, layerFrom(l))
	}
	return out, nil
}

// InspectLayer finds a layer by tag or digest.
func (c *Client) InspectLayer(ctx context.Context, ref dsec.LayerRef) (Layer, error) {
	resp, err := c.layers.Inspect(ctx, &dsecv1.InspectRequest{Ref: string(ref)})
	if err != nil {
		return Layer{}, wire.FromConnect("inspect layer", err)
	}
	return layerFrom(resp.Layer), nil
}

// LayerTrace is what is read first of a layer.
type LayerTrace struct {
	Digest     layer.Digest  `json:"digest"`
	DataSize   int64         `json:"data_size"` // bytes of the whole data
	Touched    int64         `json:"touched"`   // bytes of them that any recording touched
	Expected   int64         `json:"expected"`  // bytes of them that are expected to be read next time
	Window     time.Duration `json:"window"`    // of the longest recording
	Recordings int           `json:"recordings"`
	Files      []TracedFile  `json:"files"` // in the order in which they are first touched
	More       int64         `json:"more,omitempty"`
}

// TracedFile is what the recordings touched of a file.
type TracedFile struct {
	Path     string `json:"path"`
	Size     int64  `json:"size"`
	Touched  int64  `json:"touched"`  // bytes
	Expected int64  `json:"expected"` // bytes
	Count    int    `json:"count"`    // recordings that touched the part that most did
}

// LayerTrace tells what is read first of a layer; NotFound if nobody recorded it.
func (c *Client) LayerTrace(ctx context.Context, ref dsec.LayerRef) (LayerTrace, error) {
	resp, err := c.layers.Trace(ctx, &dsecv1.LayerTraceRequest{Ref: string(ref)})
	if err != nil {
		return LayerTrace{}, wire.FromConnect("read trace", err)
	}
	t := LayerTrace{Digest: layer.Digest(resp.Digest), DataSize: resp.DataSize, Touched: resp.Touched, Expected: resp.Expected,
		Window: time.Duration(resp.Window * float64(time.Second)), Recordings: int(resp.Recordings), More: resp.More}
	for _, f := range resp.Files {
		t.Files = append(t.Files, TracedFile{Path: f.Path, Size: f.Size, Touched: f.Touched, Expected: f.Expected, Count: int(f.Count)})
	}
	return t, nil
}

// RepackLayer makes a layer with the same tree whose data are in the order of
// the trace of this one. The tag, if there is one, points to it then.
func (c *Client) RepackLayer(ctx context.Context, ref dsec.LayerRef, tag string, progress func(Progress)) (Layer, error) {
	stream, err := c.layers.Repack(ctx, &dsecv1.RepackRequest{Ref: string(ref), Tag: tag, CallId: newKey()})
	return made("repack", string(ref), stream, err, progress)
}

// RemoveLayer drops a tag, or a layer nobody uses.
func (c *Client) RemoveLayer(ctx context.Context, ref dsec.LayerRef) (existed bool, err error) {
	req := &dsecv1.RemoveLayerRequest{Ref: string(ref), CallId: newKey()}
	var resp *dsecv1.RemoveLayerResponse
	err = c.retry(ctx, "remove layer", func() (err error) {
		resp, err = c.layers.Remove(ctx, req)
		return err
	})
	return resp.GetExisted(), err
}

// TagLayer makes a tag point to a layer.
func (c *Client) TagLayer(ctx context.Context, ref, tag dsec.LayerRef) error {
	req := &dsecv1.TagRequest{Ref: string(ref), Tag: string(tag), CallId: newKey()}
	return c.retry(ctx, "tag layer", func() error {
		_, err := c.layers.Tag(ctx, req)
		return err
	})
}

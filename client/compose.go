package client

import (
	"context"
	"io"
	"net/http"
	"net/url"
	"time"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/api/dsec/v1"
	"github.com/opendsec/dsec/api/wire"
	"github.com/opendsec/dsec/layer"
)

// EnsureProgress is how far an image is on its way to be known.
type EnsureProgress struct {
	Ref         string
	Phase       string        // queue, resolve, wait (another node is at it), convert, stack, ready
	Done, Total int64         // bytes of its layers; Total 0: unknown
	Queue       int           // images before it, and it; 0: it is being made
	Left        time.Duration // as fast as it went so far; 0: unknown
}

// EnsureOptions of Ensure.
type EnsureOptions struct {
	Arch     string        // default: the server's
	MaxAge   time.Duration // what a reference meant so long ago will do; 0: look now
	Progress func(EnsureProgress)
}

// Ensure makes the images of OCI references known ahead, each OCI layer fetched
// and converted once. All who ask for an image share the work. It returns what
// the references mean, in their order.
func (c *Client) Ensure(ctx context.Context, refs []string, o EnsureOptions) ([]Layer, error) {
	const op = "ensure images"
	stream, err := c.layers.Ensure(ctx, &dsecv1.EnsureRequest{Refs: refs, Arch: o.Arch, MaxAgeMs: o.MaxAge.Milliseconds()})
	if err != nil {
		return nil, wire.FromConnect(op, err)
	}
	defer stream.Close()
	made := map[string]Layer{}
	for stream.Receive() {
		m := stream.Msg()
		if m.Layer != nil {
			made[m.Ref] = layerFrom(m.Layer)
		}
		if o.Progress != nil && m.Phase != "" {
			o.Progress(EnsureProgress{m.Ref, m.Phase, m.Done, m.Total, int(m.Queue), time.Duration(m.LeftMs) * time.Millisecond})
		}
	}
	if err := stream.Err(); err != nil {
		return nil, wire.FromConnect(op, err)
	}
	out := make([]Layer, len(refs))
	for i, ref := range refs {
		l, ok := made[ref]
		if !ok {
			return nil, dsec.Errorf(dsec.Unavailable, op, ref, "the stream ended without it")
		}
		out[i] = l
	}
	return out, nil
}

// Template names the parts of a template.
type Template struct {
	Image     dsec.LayerRef
	Workspace dsec.LayerRef   // "": none
	Toolkits  []dsec.LayerRef // the lowest first; each shadows and deletes what is below
}

// CreateTemplate binds a name to what the parts mean now. A name that is bound
// is bound anew; sandboxes that run keep what they have.
func (c *Client) CreateTemplate(ctx context.Context, name string, t Template) (Layer, error) {
	req := &dsecv1.TemplateRequest{Tag: name, Image: string(t.Image), Workspace: string(t.Workspace), CallId: newKey()}
	for _, ref := range t.Toolkits {
		req.Toolkits = append(req.Toolkits, string(ref))
	}
	var resp *dsecv1.TemplateResponse
	err := c.retry(ctx, "create template", func() (err error) {
		resp, err = c.layers.CreateTemplate(ctx, req)
		return err
	})
	return layerFrom(resp.GetLayer()), err
}

// Templates lists the templates.
func (c *Client) Templates(ctx context.Context) ([]Layer, error) {
	all, err := c.Layers(ctx)
	var out []Layer
	for _, l := range all {
		if l.IsTemplate() {
			out = append(out, l)
		}
	}
	return out, err
}

// Merged is what became of layers that images have in common at the bottom.
type Merged struct {
	Layers []layer.Digest `json:"layers"`          // the lowest first
	Layer  layer.Digest   `json:"layer,omitempty"` // "" in a dry run
	Images []string       `json:"images"`
	Before int64          `json:"before"` // bytes of the layers
	After  int64          `json:"after"`  // bytes of the merged one; 0 in a dry run
}

// MergeLayers makes one layer of the layers that images have in common at the
// bottom: of those named, or, without names, wherever at least two have any.
func (c *Client) MergeLayers(ctx context.Context, refs []dsec.LayerRef, dry bool) ([]Merged, error) {
	req := &dsecv1.MergeRequest{DryRun: dry, CallId: newKey()}
	for _, ref := range refs {
		req.Refs = append(req.Refs, string(ref))
	}
	var resp *dsecv1.MergeResponse
	err := c.retry(ctx, "merge layers", func() (err error) {
		resp, err = c.layers.Merge(ctx, req)
		return err
	})
	var out []Merged
	for _, m := range resp.GetMerged() {
		one := Merged{Layer: layer.Digest(m.Layer), Images: m.Images, Before: m.Before, After: m.After}
		for _, d := range m.Layers {
			one.Layers = append(one.Layers, layer.Digest(d))
		}
		out = append(out, one)
	}
	return out, err
}

// ExportImage writes an image, or any layer, as an OCI image archive.
func (c *Client) ExportImage(ctx context.Context, ref dsec.LayerRef, w io.Writer) error {
	const op = "export image"
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	quiet := c.newSilence(cancel)
	defer quiet.stop()
	resp, err := c.raw(ctx, http.MethodGet, "/v1/layers/export?"+url.Values{"framed": {"1"}, "ref": {string(ref)}}.Encode(), nil)
	if err != nil {
		return quiet.blame(op, string(ref), err)
	}
	defer resp.Body.Close()
	_, err = io.Copy(w, wire.NewFrameReader(op, heard{resp.Body, quiet}))
	return quiet.blame(op, string(ref), err)
}

package client

import (
	"context"
	"time"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/api/dsec/v1"
	"github.com/opendsec/dsec/api/wire"
	"github.com/opendsec/dsec/layer"
)

// LayerDemand is what has come of a layer that is mounted or not all here. What
// was fetched, and what waited for it, counts since it was first mounted, and
// begins anew when nobody has it mounted any more.
type LayerDemand struct {
	Digest      layer.Digest  `json:"digest"`
	Tags        []string      `json:"tags"`      // of it, or of images that it is in
	DataSize    int64         `json:"data_size"` // bytes
	Chunks      int64         `json:"chunks"`
	Here        int64         `json:"here"`     // chunks that are on the node
	Touched     int64         `json:"touched"`  // bytes in the page cache of its mount; -1: it is not mounted
	Served      bool          `json:"served"`   // reads of what is not here are answered
	Requests    int64         `json:"requests"` // to object storage
	Fetched     int64         `json:"fetched"`  // bytes, as they are stored
	Plain       int64         `json:"plain"`    // bytes that they became
	Stalls      int64         `json:"stalls"`   // reads that waited
	Stalled     time.Duration `json:"stalled"`  // how long, added
	Failures    int64         `json:"failures"` // reads that were errors
	LastFailure string        `json:"last_failure"`
}

// EvictLayer gives back the room that the data of a layer, or of the layers of an
// image, take on a node: they come again, on demand. IllegalState while a sandbox
// has it.
func (c *Client) EvictLayer(ctx context.Context, ref dsec.LayerRef) (freed int64, err error) {
	req := &dsecv1.EvictRequest{Ref: string(ref), CallId: newKey()}
	var resp *dsecv1.EvictResponse
	err = c.retry(ctx, "evict layer", func() (err error) {
		resp, err = c.layers.Evict(ctx, req)
		return err
	})
	return resp.GetFreed(), err
}

// LayersOnDemand tells of the layers that are mounted or not all here.
func (c *Client) LayersOnDemand(ctx context.Context) ([]LayerDemand, error) {
	resp, err := c.layers.OnDemand(ctx, &dsecv1.OnDemandRequest{})
	if err != nil {
		return nil, wire.FromConnect("look at layers on demand", err)
	}
	out := make([]LayerDemand, 0, len(resp.Layers))
	for _, l := range resp.Layers {
		out = append(out, LayerDemand{Digest: layer.Digest(l.Digest), Tags: l.Tags, DataSize: l.DataSize, Chunks: l.Chunks, Here: l.Here, Touched: l.Touched,
			Served: l.Served, Requests: l.Requests, Fetched: l.Fetched, Plain: l.Plain, Stalls: l.Stalls,
			Stalled: time.Duration(l.Stalled * float64(time.Second)), Failures: l.Failures, LastFailure: l.LastFailure})
	}
	return out, nil
}

package nodeapi

import (
	"context"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/api/dsec/v1"
	"github.com/opendsec/dsec/layer"
)

// Demanding is what a node offers of layers whose data come as they are read.
type Demanding interface {
	// Evict gives back the room of a layer's data: IllegalState while somebody
	// has it, Unsupported where nothing would bring them again.
	Evict(ctx context.Context, ref dsec.LayerRef) (freed int64, err error)
	// OnDemand describes the layers that are mounted or not all here.
	OnDemand(ctx context.Context) ([]Demand, error)
}

// Demand is what has come of a layer.
type Demand struct {
	Digest       layer.Digest
	Tags         []string // of it, or of images that it is in
	DataSize     int64    // bytes
	Chunks, Here int      // of all; on this machine
	Touched      int64    // bytes in the page cache of its mount; -1: it is not mounted
	Served       bool     // reads of what is not here are answered

	Requests, Fetched, Plain int64 // to the blob store; bytes of them; bytes that they became
	Stalls                   int64 // reads that waited
	Stalled                  time.Duration
	Failures                 int64 // reads that were errors
	Last                     string
}

func (s *Server) evictLayer(ctx context.Context, who caller, req *dsecv1.EvictRequest) (proto.Message, error) {
	store, err := s.store(who)
	if err != nil {
		return nil, err
	}
	freed, err := store.Evict(ctx, dsec.LayerRef(req.Ref))
	return &dsecv1.EvictResponse{Freed: freed}, err
}

func (s *Server) onDemand(ctx context.Context, who caller, _ *dsecv1.OnDemandRequest) (proto.Message, error) {
	store, err := s.store(who)
	if err != nil {
		return nil, err
	}
	all, err := store.OnDemand(ctx)
	if err != nil {
		return nil, err
	}
	resp := &dsecv1.OnDemandResponse{}
	for _, d := range all {
		resp.Layers = append(resp.Layers, &dsecv1.LayerDemand{Digest: string(d.Digest), Tags: d.Tags, DataSize: d.DataSize,
			Chunks: int64(d.Chunks), Here: int64(d.Here), Touched: d.Touched, Served: d.Served, Requests: d.Requests, Fetched: d.Fetched,
			Plain: d.Plain, Stalls: d.Stalls, Stalled: d.Stalled.Seconds(), Failures: d.Failures, LastFailure: d.Last})
	}
	return resp, nil
}

package gateway

import (
	"context"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/api/dsec/v1"
	"github.com/opendsec/dsec/api/wire"
)

// Checkpoint makes no sandbox: what it takes of the object storage goes by itself.
func (s *sandboxes) Checkpoint(ctx context.Context, req *dsecv1.CheckpointRequest) (*dsecv1.CheckpointResponse, error) {
	if req.CallId == "" {
		req.CallId = "g" + dsec.Random(24) // a retry inside the platform must find what the first try made
	}
	ctx, cancel := within(ctx, commitWithin)
	defer cancel()
	resp := &dsecv1.CheckpointResponse{}
	return resp, s.on(ctx, req.Id, wire.VerbCheckpoint, req, resp)
}

// FindCheckpoint asks any node: all have the same storage.
func (s *sandboxes) FindCheckpoint(ctx context.Context, req *dsecv1.FindCheckpointRequest) (*dsecv1.CheckpointResponse, error) {
	return s.findCheckpoint(ctx, req.Digest)
}

// findCheckpoint is for the caller's own project, whatever its role: a memory is nobody else's.
func (g *Gateway) findCheckpoint(ctx context.Context, digest string) (*dsecv1.CheckpointResponse, error) {
	node, err := g.layerNode()
	if err != nil {
		return nil, err
	}
	resp := &dsecv1.CheckpointResponse{}
	return resp, g.cfg.Cluster.Call(ctx, node, wire.VerbFindCheckpoint, principal(ctx).Project, &dsecv1.FindCheckpointRequest{Digest: digest}, resp)
}

// goesOn completes a spec that names a checkpoint, so that it is placed and counted as what it will be.
func (g *Gateway) goesOn(ctx context.Context, s dsec.Spec) (dsec.Spec, error) {
	if s.Checkpoint == "" {
		return s, nil
	}
	c, err := g.findCheckpoint(ctx, s.Checkpoint)
	if err != nil {
		return s, err
	}
	return s.GoesOnFrom(wire.SpecFrom(c.Spec))
}

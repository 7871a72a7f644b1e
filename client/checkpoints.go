package client

import (
	"context"
	"time"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/api/dsec/v1"
	"github.com/opendsec/dsec/api/wire"
)

// Checkpoint keeps a running or paused sandbox, which goes on, as it is at one moment: processes,
// memory and disk, where every node finds it that has the same object storage, for that time (0:
// dsec.KeepCheckpoint). Create with a spec that has its digest as Checkpoint, and nothing else that
// has to be said, goes on from there.
func (c *Client) Checkpoint(ctx context.Context, id dsec.SandboxID, keep time.Duration) (dsec.Checkpoint, error) {
	req := &dsecv1.CheckpointRequest{Id: string(id), CallId: newKey(), Keep: wire.Seconds(keep)}
	var resp *dsecv1.CheckpointResponse
	err := c.retry(ctx, "checkpoint sandbox", func() (err error) {
		resp, err = c.sandboxes.Checkpoint(ctx, req)
		return err
	})
	return wire.CheckpointFrom(resp), err
}

// FindCheckpoint tells of a checkpoint of the caller's project.
func (c *Client) FindCheckpoint(ctx context.Context, digest string) (dsec.Checkpoint, error) {
	var resp *dsecv1.CheckpointResponse
	err := c.retry(ctx, "find checkpoint", func() (err error) {
		resp, err = c.sandboxes.FindCheckpoint(ctx, &dsecv1.FindCheckpointRequest{Digest: digest})
		return err
	})
	return wire.CheckpointFrom(resp), err
}

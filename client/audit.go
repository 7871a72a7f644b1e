package client

import (
	"context"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/api/dsec/v1"
	"github.com/opendsec/dsec/api/wire"
)

// Audit calls fn with the evidence of what a sandbox did, in order, also after it was
// deleted, as long as there is a record of it. With f.Follow it goes on until the
// sandbox is deleted, ctx ends or fn errs. A stream that breaks is an error; f.Since,
// the number of the last record, goes on from there. A node that keeps no evidence errs with Unsupported.
func (c *Client) Audit(ctx context.Context, id dsec.SandboxID, f dsec.AuditFilter, fn func(dsec.AuditRecord) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	const op = "read audit log"
	stream, err := c.sandboxes.Audit(ctx, wire.AuditRequest(id, f))
	if err != nil {
		return wire.FromConnect(op, err)
	}
	defer stream.Close()
	for stream.Receive() {
		if m := stream.Msg(); m.Record != nil {
			if err := fn(wire.AuditFrom(m.Record)); err != nil {
				return err
			}
		}
	}
	return wire.FromConnect(op, stream.Err())
}

// Findings judges that evidence as it is by now: one finding of each class of reward hacks of
// which there is any sign; those of dsec.HackConfidence and more are worth a look.
func (c *Client) Findings(ctx context.Context, id dsec.SandboxID, task dsec.HackTask) ([]dsec.HackFinding, error) {
	var resp *dsecv1.FindingsResponse
	err := c.retry(ctx, "look for reward hacks in", func() (err error) {
		resp, err = c.sandboxes.Findings(ctx, wire.FindingsRequest(id, task))
		return err
	})
	return wire.FindingsFrom(resp), err
}

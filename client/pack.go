package client

import (
	"context"
	"time"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/api/dsec/v1"
	"github.com/opendsec/dsec/api/wire"
)

// CommitOptions of Commit; the zero value leaves everything in and tags nothing.
type CommitOptions struct {
	Tag    string // that points to the layer; "": only its digest does
	Scrub  dsec.Scrub
	CallID string // key that makes it idempotent; "": a new one
}

// Commit makes a layer of what was changed in a sandbox. One that runs stands
// still for a moment and goes on. A sandbox created with the layer as its image
// goes on from there.
func (c *Client) Commit(ctx context.Context, id dsec.SandboxID, o CommitOptions) (dsec.Packed, error) {
	if o.CallID == "" {
		o.CallID = newKey()
	}
	req := &dsecv1.CommitRequest{Id: string(id), Tag: o.Tag, CallId: o.CallID, Scrub: wire.Scrub(o.Scrub)}
	var resp *dsecv1.CommitResponse
	err := c.retry(ctx, "commit sandbox", func() (err error) {
		resp, err = c.sandboxes.Commit(ctx, req)
		return err
	})
	return wire.PackedFrom(resp), err
}

// Changes lists what the disk of a sandbox differs in from its layers, at most
// so many (0: dsec.MaxChanges), also of one that failed and whose disk is kept.
func (c *Client) Changes(ctx context.Context, id dsec.SandboxID, most int) (dsec.Changes, error) {
	var resp *dsecv1.ChangesResponse
	err := c.retry(ctx, "compare disk of sandbox", func() (err error) {
		resp, err = c.sandboxes.Changes(ctx, &dsecv1.ChangesRequest{Id: string(id), Most: int32(most)})
		return err
	})
	return wire.ChangesFrom(resp), err
}

// DebugLabel names, on a sandbox that Debug made, the one it shows.
const DebugLabel = "dsec.debug"

// debugLives bounds a sandbox that was forgotten.
const debugLives = 24 * time.Hour

// Debug opens the disk of a sandbox in a new one, without its processes and
// without network: of one that failed as it was kept, else as it is now. The
// caller deletes the new one.
func (c *Client) Debug(ctx context.Context, id dsec.SandboxID) (Sandbox, error) {
	was, err := c.Get(ctx, id)
	if err != nil {
		return Sandbox{}, err
	}
	digest := ""
	if was.Kept != nil {
		digest = was.Kept.Digest
	}
	if digest == "" {
		packed, err := c.Commit(ctx, id, CommitOptions{})
		if err != nil {
			return Sandbox{}, err
		}
		digest = packed.Digest
	}
	s := was.Spec
	return c.Create(ctx, dsec.Spec{Tier: s.Tier, Image: dsec.LayerRef(digest), Env: s.Env, User: s.User, Workdir: s.Workdir, Network: dsec.NetworkNone,
		Limits: s.Limits, Lifetimes: dsec.Lifetimes{Lifetime: debugLives, Retention: time.Minute}, Profile: s.Profile, Labels: map[string]string{DebugLabel: string(id)}})
}

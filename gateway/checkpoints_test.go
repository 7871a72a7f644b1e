package gateway_test

import (
	"strings"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/gateway"
	"github.com/opendsec/dsec/iam"
)

// What thinNode knows of checkpoints: one, of a project.
const checkpointProject = "p1"

var (
	checkpointDigest = "sha256:" + strings.Repeat("c", 64)
	checkpointBase   = "sha256:" + strings.Repeat("b", 64)
)

// A spec that names a checkpoint is completed by what it is of before it is placed, for its own project only.
func TestASpecGoesOnFromACheckpoint(t *testing.T) {
	e := start(t, func(c *gateway.Config) { c.MaxLive = 2 })
	ctx, user := t.Context(), e.remote(iam.User, checkpointProject)
	sb := e.sandbox(user)
	made, err := user.Checkpoint(ctx, sb.ID, time.Hour)
	must(t, err)
	if made.Digest != checkpointDigest || made.Sandbox != sb.ID || made.Until.Unix() != 3600 || made.Disk != 2 || made.Memory != 1 {
		t.Errorf("%+v", made)
	}
	got, err := user.Create(ctx, dsec.Spec{Checkpoint: checkpointDigest, Name: "copy"})
	must(t, err)
	s := got.Spec
	if s.Tier != dsec.TierContainer || string(s.Image) != checkpointBase || s.User != "1000" || s.Limits.CPU != 2 || s.Limits.Memory != 64<<20 || s.Name != "copy" || s.Checkpoint != checkpointDigest {
		t.Errorf("%+v", s)
	}
	_, err = user.Create(ctx, dsec.Spec{Checkpoint: checkpointDigest}) // it counts as others do
	wantClass(t, err, dsec.ResourceExhausted)
	for what, other := range map[string]dsec.Spec{"limits": {Limits: dsec.Limits{CPU: 1}}, "image": {Image: "base:1"}, "tier": {Tier: dsec.TierMicroVM}, "network": {Network: dsec.NetworkOpen}} {
		other.Checkpoint = checkpointDigest
		if _, err := user.Create(ctx, other); dsec.ClassOf(err) != dsec.Invalid || !strings.Contains(strings.ToLower(err.Error()), what) {
			t.Errorf("another %s: %v", what, err)
		}
	}
	_, err = user.Create(ctx, dsec.Spec{Checkpoint: "sha256:" + strings.Repeat("d", 64)})
	wantClass(t, err, dsec.NotFound)
	for name, stranger := range map[string]iam.Role{"p2": iam.User, "p3": iam.Admin} {
		c := e.remote(stranger, name)
		_, err = c.Create(ctx, dsec.Spec{Checkpoint: checkpointDigest})
		wantClass(t, err, dsec.NotFound)
		_, err = c.FindCheckpoint(ctx, checkpointDigest)
		wantClass(t, err, dsec.NotFound)
	}
	found, err := user.FindCheckpoint(ctx, checkpointDigest)
	if err != nil || found.Spec.User != "1000" {
		t.Errorf("%+v %v", found, err)
	}
}

package gateway_test

import (
	"bytes"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/iam"
)

// shelfEnv is a gateway over a layer store in memory.
func shelfEnv(t *testing.T) *env {
	t.Helper()
	n := newThinNode()
	t.Cleanup(func() { _ = n.rt.Close() })
	return (&env{t: t, node: n, service: n, layers: newShelf()}).start()
}

func TestEnsureThroughTheGateway(t *testing.T) {
	e, ctx := shelfEnv(t), t.Context()
	c := e.remote(iam.User, "p")
	var seen []client.EnsureProgress
	refs := []string{"registry/a:1", "registry/b:1"}
	got, err := c.Ensure(ctx, refs, client.EnsureOptions{Progress: func(p client.EnsureProgress) { seen = append(seen, p) }})
	if err != nil || len(got) != 2 || got[0].Source != refs[0] || got[1].Source != refs[1] || len(got[0].Layers) != 1 {
		t.Fatalf("%+v, %v", got, err)
	}
	queued, left := false, false
	for _, p := range seen {
		queued, left = queued || p.Queue == 2, left || p.Left == time.Second && p.Total == 2
	}
	if !queued || !left {
		t.Errorf("progress: %+v", seen)
	}
	for ref, want := range map[string]dsec.Class{"registry/missing": dsec.NotFound, "/etc/passwd": dsec.Invalid, "oci:/x": dsec.Invalid, "": dsec.Invalid} {
		if _, err := c.Ensure(ctx, []string{ref}, client.EnsureOptions{}); dsec.ClassOf(err) != want {
			t.Errorf("%q: %v", ref, err)
		}
	}
	if _, err := c.Ensure(ctx, nil, client.EnsureOptions{}); !errors.Is(err, dsec.Invalid.Err()) {
		t.Errorf("none: %v", err)
	}
}

func TestTemplatesMergesAndExportsThroughTheGateway(t *testing.T) {
	e, ctx := shelfEnv(t), t.Context()
	c := e.remote(iam.User, "p")
	made, err := c.CreateTemplate(ctx, "env:1", client.Template{Image: "base:1", Toolkits: []dsec.LayerRef{"tools:1"}})
	if err != nil || !made.IsTemplate() || len(made.Layers) != 2 || made.Layers[1].Ref != "tools:1" {
		t.Fatalf("%+v, %v", made, err)
	}
	if all, err := c.Templates(ctx); err != nil || len(all) != 1 || all[0].Tags[0] != "env:1" {
		t.Errorf("%+v, %v", all, err)
	}
	if _, err := e.remote(iam.User, "other").CreateTemplate(ctx, "env:1", client.Template{Image: "x"}); !errors.Is(err, dsec.PermissionDenied.Err()) {
		t.Errorf("of another project: %v", err)
	}
	if _, err := c.MergeLayers(ctx, nil, true); !errors.Is(err, dsec.PermissionDenied.Err()) {
		t.Errorf("a user merges: %v", err)
	}
	merged, err := e.local().MergeLayers(ctx, []dsec.LayerRef{"a"}, true)
	if err != nil || len(merged) != 1 || merged[0].Images[0] != "[a] true" || merged[0].Before != 7 || len(merged[0].Layers) != 2 {
		t.Errorf("%+v, %v", merged, err)
	}
	var b bytes.Buffer
	if err := c.ExportImage(ctx, "env:1", &b); err != nil || b.String() != "archive of env:1" {
		t.Errorf("%q, %v", b.String(), err)
	}
	if err := c.ExportImage(ctx, "missing", &b); err == nil || !strings.Contains(err.Error(), "no such tag") {
		t.Errorf("missing: %v", err)
	}
}

package machine

import (
	"bytes"
	"context"
	"math"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/process"
)

// user is a client with a new key of a project.
func (h *host) user(project string) *client.Client {
	h.t.Helper()
	_, secret, err := h.CreateKey(h.t.Context(), "test", "user", project, 0)
	if err != nil {
		h.t.Fatal(err)
	}
	c, err := client.New(client.Config{URL: "unix://" + filepath.Join(h.Dir, "run", "gateway.sock"), Key: secret})
	if err != nil {
		h.t.Fatal(err)
	}
	h.t.Cleanup(func() { _ = c.Close() })
	return c
}

// A user's key makes tags of its project and moves no others, whatever the call.
func TestTagsOfOtherProjectsStayWhereTheyAre(t *testing.T) {
	t.Parallel()
	h := start(t)
	ctx, one, two := t.Context(), h.user("p1"), h.user("p2")
	box := func(c *client.Client, image dsec.LayerRef) (client.Sandbox, error) {
		return c.Create(ctx, dsec.Spec{Tier: kind.Tier, Isolation: kind.Isolation, Image: image, Limits: dsec.Limits{Memory: 128 << 20, Disk: 64 << 20}})
	}
	before, err := h.InspectLayer(ctx, "box")
	if err != nil {
		t.Fatal(err)
	}
	sb, err := box(two, "box")
	if err != nil {
		t.Fatal(err)
	}
	upload := func(c *client.Client, tag string) error {
		_, err := c.UploadTree(ctx, bytes.NewReader(busybox(t)), client.BuildOptions{Tag: tag, At: "/other"})
		return err
	}
	if err := upload(one, "mine"); err != nil {
		t.Fatal(err)
	}
	for _, tag := range []string{"box", "mine"} {
		_, err := two.Commit(ctx, sb.ID, client.CommitOptions{Tag: tag})
		for how, err := range map[string]error{"commit": err, "upload": upload(two, tag), "tag": two.TagLayer(ctx, "box", dsec.LayerRef(tag))} {
			if dsec.ClassOf(err) != dsec.PermissionDenied {
				t.Errorf("%s moves %s: %v", how, tag, err)
			}
		}
	}
	if got, err := two.Get(ctx, sb.ID); err != nil || got.State != dsec.Running {
		t.Errorf("the sandbox is %s, %v", got.State, err)
	}
	if after, err := h.InspectLayer(ctx, "box"); err != nil || after.Digest != before.Digest {
		t.Errorf("box is %s and was %s, %v", after.Digest, before.Digest, err)
	}
	if _, err := box(two, "mine"); dsec.ClassOf(err) != dsec.NotFound {
		t.Errorf("a tag of another project is used: %v", err)
	}
	if _, err := two.Commit(ctx, sb.ID, client.CommitOptions{Tag: "theirs"}); err != nil {
		t.Errorf("commit to a new tag: %v", err)
	}
	if _, err := h.Commit(ctx, sb.ID, client.CommitOptions{Tag: "theirs"}); err != nil {
		t.Errorf("an admin moves it: %v", err)
	}
}

// What a caller got wrong is invalid, and never the platform's fault.
func TestWrongRequestsAreTheCallers(t *testing.T) {
	t.Parallel()
	h := start(t)
	ctx := t.Context()
	digest, err := h.InspectLayer(ctx, "box")
	if err != nil {
		t.Fatal(err)
	}
	for what, change := range map[string]func(*dsec.Spec){
		"pids":        func(s *dsec.Spec) { s.Limits.Pids = math.MaxInt64 },
		"memory":      func(s *dsec.Spec) { s.Limits.Memory = math.MaxInt64 },
		"disk":        func(s *dsec.Spec) { s.Limits.Disk = math.MaxInt64 },
		"NUL":         func(s *dsec.Spec) { s.Workdir = "/a\x00b" },
		"long path":   func(s *dsec.Spec) { s.Workdir = "/" + strings.Repeat("x", 5000) },
		"user":        func(s *dsec.Spec) { s.User = "root\x00" },
		"rollout key": func(s *dsec.Spec) { s.RolloutKey = strings.Repeat("x", 1<<20) },
		"layer 64 times": func(s *dsec.Spec) {
			for range 64 {
				s.Layers = append(s.Layers, "box")
			}
		},
	} {
		s := kind
		change(&s)
		if _, err := h.Create(ctx, s); dsec.ClassOf(err) != dsec.Invalid {
			t.Errorf("%s: %v", what, err)
		}
	}
	list, _, err := h.List(context.WithoutCancel(ctx), client.ListOptions{All: true})
	if err != nil {
		t.Fatal(err)
	}
	for _, sb := range list {
		if sb.Result == nil || sb.Result.Mask() {
			t.Errorf("blamed on the platform: %+v", sb.Result)
		}
	}
	// One layer by two names is stacked once, where it is topmost.
	id := h.create(func(s *dsec.Spec) { s.Layers = []dsec.LayerRef{dsec.LayerRef(digest.Digest)} })
	for what, s := range map[string]process.Spec{
		"argv": {Argv: []string{"echo", "a\x00b"}}, "env": {Argv: []string{"env"}, Env: map[string]string{"A": "a\x00b"}},
		"cwd": {Argv: []string{"pwd"}, Cwd: "/\x00"}, "user": {Argv: []string{"id"}, User: "root\x00x"},
	} {
		if _, err := h.Exec(ctx, id, s); dsec.ClassOf(err) != dsec.Invalid {
			t.Errorf("NUL in %s: %v", what, err)
		}
	}
}

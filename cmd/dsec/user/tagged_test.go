package user

import (
	"bytes"
	"context"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	connectrpc "connectrpc.com/connect"
	"github.com/spf13/cobra"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/api/dsec/v1"
	"github.com/opendsec/dsec/api/dsec/v1/dsecv1connect"
	"github.com/opendsec/dsec/api/wire"
)

const oldDigest, newDigest = "sha256:1111111111111111111111111111111111111111111111111111111111111111", "sha256:2222222222222222222222222222222222222222222222222222222222222222"

// tags is a server of layers where some names mean something.
type tags struct {
	dsecv1connect.UnimplementedLayersHandler
	old map[string]*dsecv1.Layer
}

func (t tags) Inspect(_ context.Context, req *dsecv1.InspectRequest) (*dsecv1.InspectResponse, error) {
	if l := t.old[req.Ref]; l != nil {
		return &dsecv1.InspectResponse{Layer: l}, nil
	}
	return nil, wire.ConnectError(dsec.Errorf(dsec.NotFound, "resolve layer", req.Ref, "no image or layer of that name"))
}

func (t tags) CreateTemplate(_ context.Context, req *dsecv1.TemplateRequest) (*dsecv1.TemplateResponse, error) {
	return &dsecv1.TemplateResponse{Layer: &dsecv1.Layer{Digest: newDigest, Tags: []string{req.Tag}}}, nil
}

func (t tags) Import(_ context.Context, _ *dsecv1.ImportRequest, s *connectrpc.ServerStream[dsecv1.ImportResponse]) error {
	return s.Send(&dsecv1.ImportResponse{Layer: &dsecv1.Layer{Digest: newDigest}})
}

func (t tags) Build(_ context.Context, _ *dsecv1.BuildRequest, s *connectrpc.ServerStream[dsecv1.ImportResponse]) error {
	return s.Send(&dsecv1.ImportResponse{Layer: &dsecv1.Layer{Digest: newDigest}})
}

func (t tags) Repack(_ context.Context, _ *dsecv1.RepackRequest, s *connectrpc.ServerStream[dsecv1.ImportResponse]) error {
	return s.Send(&dsecv1.ImportResponse{Layer: &dsecv1.Layer{Digest: newDigest}})
}

// disks is a server of sandboxes whose disks are all the same.
type disks struct {
	dsecv1connect.UnimplementedSandboxesHandler
}

func (disks) List(context.Context, *dsecv1.ListRequest) (*dsecv1.ListResponse, error) {
	return &dsecv1.ListResponse{Sandboxes: []*dsecv1.Sandbox{{Id: "s1", State: "running", Spec: &dsecv1.Spec{Name: "work"}}}}, nil
}

func (disks) Commit(context.Context, *dsecv1.CommitRequest) (*dsecv1.CommitResponse, error) {
	return &dsecv1.CommitResponse{Digest: newDigest}, nil
}

// serve makes a server the one that verbs talk to.
func serve(t *testing.T, mux *http.ServeMux) {
	t.Helper()
	s := httptest.NewServer(mux)
	t.Cleanup(s.Close)
	t.Setenv("DSEC_SOCKET", "")
	t.Setenv("DSEC_URL", s.URL)
}

// said runs a verb and returns what it prints.
func said(t *testing.T, v func() *cobra.Command, args ...string) (out, errs string, err error) {
	t.Helper()
	return saidIn(t, t.Context(), v, args...)
}

func saidIn(t *testing.T, ctx context.Context, v func() *cobra.Command, args ...string) (out, errs string, err error) {
	t.Helper()
	var o, e bytes.Buffer
	root := &cobra.Command{Use: "dsec", SilenceErrors: true, SilenceUsage: true}
	Register(root)
	c := v()
	root.AddCommand(c)
	root.SetOut(&o)
	root.SetErr(&e)
	root.SetArgs(append([]string{c.Name()}, args...))
	err = root.ExecuteContext(ctx)
	return o.String(), e.String(), err
}

// TestANameThatIsTakenOverIsSaid, by every verb that can.
func TestANameThatIsTakenOverIsSaid(t *testing.T) {
	verbs := map[string]struct {
		verb func() *cobra.Command
		args []string
	}{
		"template create": {Template, []string{"create", "TAG", "--image", "debian:12"}},
		"image import":    {Image, []string{"import", "docker.io/library/debian:12", "--tag", "TAG"}},
		"layer build":     {Layer, []string{"build", "--from", "docker.io/library/debian:12", "--tag", "TAG"}},
		"layer repack":    {Layer, []string{"repack", "debian:12", "--tag", "TAG"}},
		"commit":          {Commit, []string{"work", "TAG"}},
	}
	old := map[string]*dsecv1.Layer{
		"image:1": {Digest: oldDigest, Image: true, Tags: []string{"image:1"}},
		"disk:1":  {Digest: oldDigest, Lineage: &dsecv1.Lineage{}, Tags: []string{"other", "disk:1"}},
		"same:1":  {Digest: newDigest, Tags: []string{"same:1"}},
		"ref:1":   {Digest: oldDigest, Image: true}, // a reference that was pulled
	}
	mux := http.NewServeMux()
	mux.Handle(dsecv1connect.NewLayersHandler(tags{old: old}))
	mux.Handle(dsecv1connect.NewSandboxesHandler(disks{}))
	serve(t, mux)
	for name, v := range verbs {
		for tag, want := range map[string]string{"image:1": "image", "disk:1": "disk", "same:1": "", "ref:1": "", "new:1": ""} {
			args := make([]string, len(v.args))
			for i, a := range v.args {
				args[i] = strings.ReplaceAll(a, "TAG", tag)
			}
			out, errs, err := said(t, v.verb, args...)
			if want != "" {
				want = "dsec: " + tag + " pointed to " + want + " " + oldDigest + " before\n"
			}
			if err != nil || strings.TrimSpace(out) != newDigest || errs != want {
				t.Errorf("%s %s: %v\n%q\n%q, want %q", name, tag, err, out, errs, want)
			}
		}
	}
}

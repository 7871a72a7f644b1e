package gateway_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/iam"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/node"
	"github.com/opendsec/dsec/node/nodeapi"
	"github.com/opendsec/dsec/runtime"
	"github.com/opendsec/dsec/runtime/runtimetest"
)

// withNode is a cluster of one with the real node over the fake tier.
func withNode(t *testing.T, opts ...option) *env {
	t.Helper()
	rt := runtimetest.NewFake()
	t.Cleanup(func() { _ = rt.Close() })
	n, err := node.New(node.Config{ID: "nodea", Dir: t.TempDir(), Runtimes: map[dsec.Tier]runtime.Runtime{dsec.TierContainer: rt},
		Store: runtimetest.NewStore(), Budgets: node.Budgets{CPU: 1000, Memory: 1 << 42, Disk: 1 << 44}, StopGrace: 50 * time.Millisecond, Log: quiet})
	must(t, err)
	t.Cleanup(func() { _ = n.Close() })
	e := &env{t: t, service: n}
	return e.start(opts...)
}

func TestRealNodeBehindTheGateway(t *testing.T) {
	e := withNode(t)
	c, ctx := e.remote(iam.User, "p"), t.Context()
	specs := make([]dsec.Spec, 100)
	for i := range specs {
		specs[i] = spec
	}
	specs[7].Image = "missing"
	events := make(chan dsec.Event, 10_000)
	s, err := c.OpenSession(ctx, &client.Events{Types: []dsec.EventType{dsec.EventState}}, func(ev dsec.Event) { events <- ev })
	must(t, err)
	defer s.Close()
	var made []client.Sandbox
	must(t, c.CreateMany(ctx, specs, "", func(r client.Created) error {
		if (r.Index == 7) != (r.Err != nil) {
			t.Errorf("%d: %v", r.Index, r.Err)
		}
		if r.Err == nil {
			made = append(made, r.Sandbox)
		}
		return nil
	}))
	if len(made) != 99 || len(made[0].Steps) == 0 {
		t.Fatalf("%d made, steps %v", len(made), made[0].Steps)
	}
	var wg sync.WaitGroup
	for _, sb := range made {
		wg.Go(func() {
			var out bytes.Buffer
			r, err := s.Exec(ctx, sb.ID, sh("echo $HOSTNAME; echo "+string(sb.ID)), client.ModeStream, func(ch client.Chunk) error {
				out.Write(ch.Data)
				return nil
			})
			if err != nil {
				t.Error(err)
				return
			}
			if end, err := r.Wait(ctx); err != nil || end.ExitCode != 0 || !strings.Contains(out.String(), string(sb.ID)) {
				t.Errorf("%+v, %v, %q", end, err, out.String())
			}
		})
	}
	wg.Wait()
	sb := made[0]
	got, err := c.Stop(ctx, sb.ID, dsec.CauseAgentError)
	if err != nil || got.State != dsec.Stopped || got.Result.Cause != dsec.CauseAgentError {
		t.Fatalf("%+v, %v", got, err)
	}
	_, err = c.Exec(ctx, sb.ID, sh("true"))
	if cl := dsec.ClassOf(err); cl != dsec.SandboxGone && cl != dsec.IllegalState {
		t.Fatal(err)
	}
	for _, sb := range made {
		if existed, err := c.Delete(ctx, sb.ID); err != nil || !existed {
			t.Fatal(existed, err)
		}
	}
	deleted := map[dsec.SandboxID]bool{}
	for len(deleted) < len(made) {
		select {
		case ev := <-events:
			if ev.To == dsec.Deleted {
				deleted[ev.Sandbox] = true
			}
		case <-time.After(10 * time.Second):
			t.Fatalf("%d of %d deletions were told", len(deleted), len(made))
		}
	}
	rec, err := c.Get(ctx, sb.ID)
	if err != nil || rec.State != dsec.Deleted || rec.Result == nil || rec.Result.Cause != dsec.CauseAgentError {
		t.Fatalf("%+v, %v", rec, err)
	}
}

func TestErrorSaysHowTheSandboxEnded(t *testing.T) {
	e := withNode(t)
	c, ctx := e.local(), t.Context()
	sb := e.sandbox(c)
	p, err := c.Exec(ctx, sb.ID, sh("sleep 100"))
	must(t, err)
	done := make(chan error, 1)
	go func() { _, err := p.Wait(ctx); done <- err }()
	_, err = c.Delete(ctx, sb.ID)
	must(t, err)
	select {
	case err := <-done:
		if err != nil {
			if cl := dsec.ClassOf(err); cl != dsec.SandboxGone && cl != dsec.NotFound {
				t.Fatal(err)
			}
		}
	case <-time.After(10 * time.Second):
		t.Fatal("the wait hangs")
	}
	_, err = c.Exec(ctx, sb.ID, sh("true"))
	if dsec.ClassOf(err) == dsec.SandboxGone {
		if r := client.ResultOf(err); r == nil || r.Cause == "" {
			t.Fatalf("%v says nothing of the end: %+v", err, r)
		}
	}
}

// shelf is a layer store that swallows tars.
type shelf struct {
	*shelved
	project string
}

type shelved struct {
	mu     sync.Mutex
	list   map[string]nodeapi.Layer
	owners map[string]string // of tags
	made   int               // layers
}

func newShelf() *shelf {
	return &shelf{shelved: &shelved{list: map[string]nodeapi.Layer{}, owners: map[string]string{}}}
}

func (s *shelf) For(project string) nodeapi.Layers { return &shelf{s.shelved, project} }

func (s *shelf) MayTag(_ context.Context, tag dsec.LayerRef) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if owner, ok := s.owners[string(tag)]; ok && s.project != "" && owner != s.project {
		return dsec.Errorf(dsec.PermissionDenied, "tag layer", string(tag), "it is not of project %s", s.project)
	}
	return nil
}

func (s *shelf) put(tag, source string, size int64) nodeapi.Layer {
	s.mu.Lock()
	defer s.mu.Unlock()
	l := nodeapi.Layer{Info: layer.Info{Digest: "sha256:0", Source: source, DataSize: size}, Tags: []string{tag}}
	s.list[tag], s.owners[tag] = l, s.project
	s.made++
	return l
}

func (s *shelf) Import(_ context.Context, r nodeapi.Import, progress func(nodeapi.Progress)) (nodeapi.Layer, error) {
	if r.Source == "registry/missing" {
		return nodeapi.Layer{}, dsec.Errorf(dsec.NotFound, "resolve", r.Source, "no such manifest")
	}
	progress(nodeapi.Progress{Phase: "fetch", Done: 1, Total: 2})
	progress(nodeapi.Progress{Phase: "convert", Done: 2, Total: 2})
	return s.put(r.Tag, r.Source, 0), nil
}

func (s *shelf) Build(_ context.Context, r nodeapi.Build, progress func(nodeapi.Progress)) (nodeapi.Layer, error) {
	if r.Tar == nil {
		return s.put(r.Tag, r.Source, 0), nil
	}
	var n int64
	buf := make([]byte, 1<<20)
	for {
		k, err := r.Tar.Read(buf)
		n += int64(k)
		progress(nodeapi.Progress{Phase: "convert", Done: n})
		if err == io.EOF {
			return s.put(r.Tag, r.Source, n), nil
		}
		if err != nil {
			return nodeapi.Layer{}, dsec.E(dsec.Canceled, "read tar", "", err)
		}
	}
}

func (s *shelf) List(context.Context) (out []nodeapi.Layer, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, l := range s.list {
		out = append(out, l)
	}
	return out, nil
}

func (s *shelf) Inspect(_ context.Context, ref dsec.LayerRef) (nodeapi.Layer, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if l, ok := s.list[string(ref)]; ok {
		return l, nil
	}
	return nodeapi.Layer{}, dsec.Errorf(dsec.NotFound, "find layer", string(ref), "no such tag")
}

func (s *shelf) Remove(_ context.Context, ref dsec.LayerRef) (bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, ok := s.list[string(ref)]
	delete(s.list, string(ref))
	return ok, nil
}

func (s *shelf) Ensure(_ context.Context, r nodeapi.Ensure, progress func(layer.Progress)) (nodeapi.Layer, error) {
	if r.Ref == "registry/missing" {
		return nodeapi.Layer{}, dsec.Errorf(dsec.NotFound, "resolve", r.Ref, "no such manifest")
	}
	progress(layer.Progress{Phase: "queue", Queue: 2})
	progress(layer.Progress{Phase: "convert", Done: 1, Total: 2, Left: time.Second})
	return nodeapi.Layer{Info: layer.Info{Digest: "sha256:1", Source: r.Ref, Layers: []layer.Part{{Digest: "sha256:2"}}}}, nil
}

func (s *shelf) Template(ctx context.Context, t nodeapi.Template) (nodeapi.Layer, error) {
	if err := s.MayTag(ctx, dsec.LayerRef(t.Name)); err != nil {
		return nodeapi.Layer{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	l := nodeapi.Layer{Info: layer.Info{Digest: "sha256:3", Layers: []layer.Part{{Digest: "sha256:2", Role: layer.RoleBase, Ref: t.Image}}}, Tags: []string{t.Name}}
	for _, ref := range t.Toolkits {
		l.Layers = append(l.Layers, layer.Part{Digest: "sha256:4", Role: layer.RoleToolkit, Ref: ref})
	}
	s.list[t.Name], s.owners[t.Name] = l, s.project
	s.made++
	return l, nil
}

func (s *shelf) Merge(_ context.Context, refs []dsec.LayerRef, dry bool) ([]nodeapi.Merged, error) {
	return []nodeapi.Merged{{Layers: []layer.Digest{"sha256:5", "sha256:6"}, Images: []string{fmt.Sprint(refs, dry)}, Before: 7, After: 3}}, nil
}

func (s *shelf) Export(_ context.Context, ref dsec.LayerRef, w io.Writer) error {
	if ref == "missing" {
		return dsec.Errorf(dsec.NotFound, "find layer", string(ref), "no such tag")
	}
	_, err := io.WriteString(w, "archive of "+string(ref))
	return err
}

func (s *shelf) Trace(ctx context.Context, ref dsec.LayerRef) (nodeapi.Trace, error) {
	l, err := s.Inspect(ctx, ref)
	if err != nil {
		return nodeapi.Trace{}, err
	}
	t := nodeapi.Trace{Trace: layer.TraceOf(l.Digest, time.Minute, []layer.Range{{Off: 4096, Len: 8192}}, true), DataSize: 1 << 20}
	for i := range 10000 {
		t.Files = append(t.Files, nodeapi.TracedFile{Path: fmt.Sprintf("usr/lib/%08d", i), Size: 9000, Touched: 8192, Expected: 4096, Count: 1})
	}
	return t, nil
}

func (s *shelf) Evict(ctx context.Context, ref dsec.LayerRef) (int64, error) {
	l, err := s.Inspect(ctx, ref)
	return l.DataSize, err
}

func (s *shelf) OnDemand(ctx context.Context) (out []nodeapi.Demand, err error) {
	all, err := s.List(ctx)
	for _, l := range all {
		out = append(out, nodeapi.Demand{Digest: l.Digest, Tags: l.Tags, DataSize: l.DataSize, Chunks: 9, Here: 3, Touched: -1, Served: true, Requests: 1,
			Fetched: 2, Plain: 4, Stalls: 5, Stalled: 1500 * time.Millisecond, Failures: 6, Last: "read layer: gone"})
	}
	return out, err
}

func (s *shelf) Repack(ctx context.Context, r nodeapi.Repack, progress func(nodeapi.Progress)) (nodeapi.Layer, error) {
	l, err := s.Inspect(ctx, r.Ref)
	if err != nil {
		return l, err
	}
	progress(nodeapi.Progress{Phase: "repack"})
	return s.put(r.Tag, "repacked from "+string(l.Digest), l.DataSize), nil
}

func (s *shelf) Tag(ctx context.Context, ref, tag dsec.LayerRef) error {
	l, err := s.Inspect(ctx, ref)
	if err == nil {
		s.put(string(tag), l.Source, l.DataSize)
	}
	return err
}

func TestLayersThroughTheGateway(t *testing.T) {
	n := newThinNode()
	t.Cleanup(func() { _ = n.rt.Close() })
	e := (&env{t: t, node: n, service: n, layers: newShelf()}).start()
	c, ctx := e.local(), t.Context()
	var phases []string
	l, err := c.Import(ctx, "registry/base:1", "base:1", func(p client.Progress) { phases = append(phases, p.Phase) })
	if err != nil || l.Source != "registry/base:1" || strings.Join(phases, " ") != "fetch convert" {
		t.Fatal(l, phases, err)
	}
	_, err = c.Import(ctx, "registry/missing", "m", nil)
	wantClass(t, err, dsec.NotFound)
	l, err = c.UploadTree(ctx, io.LimitReader(zeros{}, 20<<20), client.BuildOptions{Tag: "ws:1", At: "/w"})
	if err != nil || l.DataSize != 20<<20 {
		t.Fatal(l, err)
	}
	must(t, c.TagLayer(ctx, "ws:1", "ws:2"))
	if list, err := c.Layers(ctx); err != nil || len(list) != 3 {
		t.Fatal(list, err)
	}
	if _, err := c.InspectLayer(ctx, "ws:2"); err != nil {
		t.Fatal(err)
	}
	// A trace of more files than an answer holds says how many are left out.
	tr, err := c.LayerTrace(ctx, "ws:2")
	if err != nil || tr.Recordings != 1 || tr.Touched != 8192 || tr.DataSize != 1<<20 || tr.Window != time.Minute ||
		len(tr.Files) < 1000 || tr.More != int64(10000-len(tr.Files)) || tr.Files[7].Path != "usr/lib/00000007" || tr.Files[7].Expected != 4096 {
		t.Errorf("trace: %d files, %d more, %v", len(tr.Files), tr.More, err)
	}
	_, err = c.LayerTrace(ctx, "none:1")
	wantClass(t, err, dsec.NotFound)
	if l, err := c.RepackLayer(ctx, "ws:2", "ws:3", nil); err != nil || !strings.HasPrefix(l.Source, "repacked from") || l.Tags[0] != "ws:3" {
		t.Errorf("repack: %+v, %v", l, err)
	}
	_, err = c.RepackLayer(ctx, "none:1", "", nil)
	wantClass(t, err, dsec.NotFound)
	if freed, err := c.EvictLayer(ctx, "ws:2"); err != nil || freed == 0 {
		t.Errorf("evict: %d, %v", freed, err)
	}
	_, err = c.EvictLayer(ctx, "none:1")
	wantClass(t, err, dsec.NotFound)
	demand, err := c.LayersOnDemand(ctx)
	if err != nil || len(demand) == 0 {
		t.Fatal(demand, err)
	}
	want := client.LayerDemand{Digest: demand[0].Digest, Tags: demand[0].Tags, DataSize: demand[0].DataSize, Chunks: 9, Here: 3, Touched: -1, Served: true,
		Requests: 1, Fetched: 2, Plain: 4, Stalls: 5, Stalled: 1500 * time.Millisecond, Failures: 6, LastFailure: "read layer: gone"}
	if !reflect.DeepEqual(demand[0], want) || demand[0].Digest == "" {
		t.Errorf("on demand: %+v, want %+v", demand[0], want)
	}
	if existed, err := c.RemoveLayer(ctx, "ws:2"); err != nil || !existed {
		t.Fatal(existed, err)
	}
	user := e.remote(iam.User, "p")
	for _, source := range []string{"/etc", "oci:/var/lib", "../x", "dir:/etc", "./a"} {
		_, err = user.Import(ctx, source, "x", nil)
		wantClass(t, err, dsec.PermissionDenied)
	}
	if _, err := user.Import(ctx, "registry/base:1", "mine:1", nil); err != nil {
		t.Fatal(err)
	}
	_, err = user.RemoveLayer(ctx, "base:1")
	wantClass(t, err, dsec.PermissionDenied)
	if reports, err := user.Doctor(ctx, ""); err != nil || len(reports) != 1 {
		t.Fatal(reports, err)
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

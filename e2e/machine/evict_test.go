package machine

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/runtime"
)

// TestEvictedLayersComeAgain: data that are given back come again as they are
// read, every byte right; what was read is known the next time.
func TestEvictedLayersComeAgain(t *testing.T) {
	for _, how := range []string{"fuse", "pre-content"} {
		t.Run(how, func(t *testing.T) {
			needs(t, how)
			evictAndRead(t, how)
		})
	}
}

func evictAndRead(t *testing.T, how string) {
	ctx := t.Context()
	dir, err := os.MkdirTemp("/var/tmp", "dsec-e2e-")
	if err != nil {
		t.Fatal(err)
	}
	h := startWith(t, dir, "blobs: file://"+filepath.Join(t.TempDir(), "blobs")+"\n", "on_demand: "+how)
	made, err := h.UploadTree(ctx, bytes.NewReader(randomTree(t, 300)), client.BuildOptions{Tag: "data"})
	if err != nil {
		t.Fatal(err)
	}
	read := func(script, want string) dsec.SandboxID {
		t.Helper()
		id := h.create(func(s *dsec.Spec) { s.Layers = []dsec.LayerRef{"data"} })
		if out, err := h.follow(ctx, id, script); err != nil || out != want {
			t.Fatalf("%q, %v", out, err)
		}
		return id
	}
	const some = `cd /data && head -n 40 sums | sha256sum -cs && echo right`
	id := read(some, "right\n")
	if _, err := h.EvictLayer(ctx, "data"); dsec.ClassOf(err) != dsec.IllegalState || !strings.Contains(err.Error(), string(id)) {
		t.Errorf("while a sandbox has it: %v", err)
	}
	evict := func(id dsec.SandboxID) int64 {
		t.Helper()
		if _, err := h.Delete(ctx, id); err != nil {
			t.Fatal(err)
		}
		freed, err := h.EvictLayer(ctx, "data")
		if err != nil {
			t.Fatal(err)
		}
		if d := h.demand(dsec.LayerRef(made.Digest)); d.Here != 0 || d.Touched != -1 || d.Served || d.Tags[0] != "data" {
			t.Errorf("after eviction: %+v", d)
		}
		return freed
	}
	if freed := evict(id); freed < made.DataSize/2 {
		t.Errorf("%d of %d bytes are free", freed, made.DataSize)
	}
	if _, err := h.LayerTrace(ctx, "data"); dsec.ClassOf(err) != dsec.NotFound {
		t.Errorf("a trace of plain files: %v", err)
	}
	id = read(some, "right\n")
	first := h.demand(dsec.LayerRef(made.Digest))
	if first.Stalls == 0 || first.Touched <= 0 == hosted() || first.Plain < first.Touched || first.Here == 0 || first.Here == first.Chunks || !first.Served {
		t.Errorf("some of it is read: %+v", first)
	}
	evict(id)
	if tr, err := h.LayerTrace(ctx, "data"); hosted() && (err != nil || tr.Recordings != 1 || tr.Touched < first.Touched) {
		t.Errorf("touched %d, trace: %+v, %v", first.Touched, tr, err)
	}
	// All of it, while the loader is killed once; then it is plain files, and goes again.
	id = h.create(func(s *dsec.Spec) { s.Layers = []dsec.LayerRef{"data"} })
	h.Kill("loader")
	if out, err := h.follow(ctx, id, reading); err != nil || out != "read 300\n" {
		t.Errorf("%q, %v", out, err)
	}
	evict(id)
	evict(read(some, "right\n"))
	checks := h.demandChecks()
	if !strings.Contains(checks, how+", the loader is process") || !strings.Contains(checks, "1 layers have not come whole") {
		t.Errorf("doctor says %q", checks)
	}
}

// demand finds one layer, by its digest or its first tag.
func (h *host) demand(ref dsec.LayerRef) client.LayerDemand {
	h.t.Helper()
	all, err := h.LayersOnDemand(h.t.Context())
	if err != nil {
		h.t.Fatal(err)
	}
	for _, l := range all {
		if string(l.Digest) == string(ref) || len(l.Tags) > 0 && l.Tags[0] == string(ref) {
			return l
		}
	}
	h.t.Fatalf("%s is not among %+v", ref, all)
	return client.LayerDemand{}
}

// demandChecks is what doctor says of layers on demand.
func (h *host) demandChecks() string { return h.check("layers on demand").Detail }

// check is what doctor says of something.
func (h *host) check(name string) runtime.Check {
	reports, err := h.Doctor(h.t.Context(), "")
	if err != nil {
		h.t.Fatal(err)
	}
	for _, r := range reports {
		for _, c := range r.Checks {
			if c.Name == name {
				return c
			}
		}
	}
	h.t.Fatalf("doctor says nothing of %s: %+v", name, reports)
	return runtime.Check{}
}

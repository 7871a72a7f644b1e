package node

import (
	"strings"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/runtime"
	"github.com/opendsec/dsec/runtime/runtimetest"
)

// TestAnIsolationIsGivenOrRefused: by its name, and never another one in its place.
func TestAnIsolationIsGivenOrRefused(t *testing.T) {
	w := newWorld(t, nil)
	behind := func(s *dsec.Spec) { s.Isolation = dsec.IsolationGVisor }
	_, err := w.Create(t.Context(), "proj", spec(behind))
	if dsec.ClassOf(err) != dsec.Unsupported || !strings.Contains(err.Error(), "isolation gvisor") {
		t.Fatalf("without a runtime for it: %v", err)
	}
	w.empty()
	other := runtimetest.NewFake()
	t.Cleanup(func() { _ = other.Close() }) // of a fake
	w.cfg.Isolated = map[dsec.Isolation]runtime.Runtime{dsec.IsolationGVisor: other}
	w.shut()
	w.open()
	plain, sb := w.create(nil), w.create(behind)
	for rt, want := range map[runtime.Runtime]dsec.SandboxID{w.fake: plain.ID, other: sb.ID} {
		if list, err := rt.List(t.Context()); err != nil || len(list) != 1 || list[0].ID != want {
			t.Errorf("%v %v, want %s", list, err, want)
		}
	}
	if sb.Spec.OOM != dsec.OOMSandbox || plain.Spec.OOM != dsec.OOMExec {
		t.Errorf("out of memory ends %q behind gvisor, %q in a container", sb.Spec.OOM, plain.Spec.OOM)
	}
	if a, b := plain.Spec.Isolated(), sb.Spec.Isolated(); a != "namespaces" || b != "gvisor" {
		t.Errorf("isolated by %s and %s", a, b)
	}
	for _, id := range []dsec.SandboxID{plain.ID, sb.ID} {
		if _, err := w.Delete(t.Context(), id, ""); err != nil {
			t.Error(err)
		}
	}
}

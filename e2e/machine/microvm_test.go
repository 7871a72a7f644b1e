package machine

import (
	"strings"
	"testing"

	"github.com/opendsec/dsec"
)

// A sandbox of the tier that is a machine of its own: copies of it, its memory on disk, and a killed
// agent; and what other tiers say when they are asked for that.
func TestMicroVMFromOutside(t *testing.T) {
	was := kind
	kind.Tier, kind.Isolation = dsec.TierMicroVM, dsec.IsolationDefault
	defer func() { kind = was }()
	h := start(t)
	id := h.create(func(s *dsec.Spec) { s.Name, s.Network = "work", dsec.NetworkOpen })
	if out, _ := h.sh(id, "echo kept >/f; hostname"); out != string(id)+"\n" {
		t.Errorf("host name %q", out)
	}
	copies, err := h.Fork(t.Context(), id, 2)
	if err != nil || len(copies) != 2 {
		t.Fatal(copies, err)
	}
	seen := map[string]bool{}
	for _, sb := range copies {
		out, _ := h.sh(sb.ID, "cat /f /proc/sys/kernel/random/uuid")
		if !strings.HasPrefix(out, "kept\n") || seen[out] || sb.State != dsec.Running || sb.Spec.Name != "" {
			t.Errorf("copy %+v: %q", sb, out)
		}
		seen[out] = true
	}
	for _, n := range []int{-1, 1001} {
		if _, err := h.Fork(t.Context(), id, n); dsec.ClassOf(err) != dsec.Invalid {
			t.Errorf("%d copies: %v", n, err)
		}
	}
	if sb, err := h.Suspend(t.Context(), id); err != nil || sb.State != dsec.Paused {
		t.Fatal(sb, err)
	}
	h.Kill("node")
	if out, _ := h.sh(id, "cat /f"); out != "kept\n" { // which has it go on
		t.Errorf("after the agent was killed: %q", out)
	}
	if sb, err := h.Get(t.Context(), id); err != nil || sb.State != dsec.Running {
		t.Error(sb, err)
	}
	kind.Tier = dsec.TierContainer
	plain := h.create(nil)
	if _, err := h.Fork(t.Context(), plain, 1); dsec.ClassOf(err) != dsec.Unsupported || !strings.Contains(err.Error(), "container") {
		t.Errorf("a copy of a container: %v", err)
	}
	if _, err := h.Suspend(t.Context(), plain); dsec.ClassOf(err) != dsec.Unsupported || !strings.Contains(err.Error(), "container") {
		t.Errorf("the memory of a container: %v", err)
	}
	for _, id := range []dsec.SandboxID{id, copies[0].ID, copies[1].ID, plain} {
		if existed, err := h.Delete(t.Context(), id); err != nil || !existed {
			t.Errorf("%v, %v", existed, err)
		}
	}
}

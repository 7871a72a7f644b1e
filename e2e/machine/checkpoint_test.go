package machine

import (
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob/s3test"
	"github.com/opendsec/dsec/process"
)

// A checkpoint outlives its sandbox and the machine that made it: what counted there counts on in a sandbox that
// another machine makes of it, which knows nothing but the object storage. A container cannot be kept so.
func TestMicroVMCheckpointFromOutside(t *testing.T) {
	was := kind
	kind.Tier, kind.Isolation = dsec.TierMicroVM, dsec.IsolationDefault
	defer func() { kind = was }()
	server := s3test.Start(t)
	credentials(t, server)
	shared := fmt.Sprintf("blobs: s3://%s/dsec?endpoint=%s\n", s3test.BucketName, server.Endpoint())
	h := startWith(t, stateDir(t), shared)
	id := h.create(func(s *dsec.Spec) { s.Name, s.Network = "work", dsec.NetworkOpen })
	h.sh(id, "echo kept >/f")
	const counts = "n=0; while n=$((n+1)); do echo $n >/n.new; mv /n.new /n; sleep 0.05; done"
	if _, err := h.Exec(t.Context(), id, process.Spec{ID: "counter", Argv: []string{"sh", "-c", counts}}); err != nil {
		t.Fatal(err)
	}
	count := func(id dsec.SandboxID) int {
		out, _ := h.sh(id, "cat /n")
		n, err := strconv.Atoi(strings.TrimSpace(out))
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	counted := func(id dsec.SandboxID, more int) int {
		for deadline := time.Now().Add(time.Minute); ; {
			if n := count(id); n > more {
				return n
			} else if time.Now().After(deadline) {
				t.Fatalf("it has counted to %d, and not beyond %d", n, more)
			}
			time.Sleep(50 * time.Millisecond)
		}
	}
	h.sh(id, "while ! test -e /n; do sleep 0.05; done")
	before := counted(id, 3)
	made, err := h.Checkpoint(t.Context(), id, time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	counted(id, count(id)) // it goes on
	if existed, err := h.Delete(t.Context(), id); err != nil || !existed {
		t.Fatal(existed, err)
	}
	h.Down()
	h = startWith(t, stateDir(t), shared)
	sb, err := h.Create(t.Context(), dsec.Spec{Checkpoint: made.Digest, Name: "work"})
	if err != nil {
		t.Fatal(err)
	}
	if out, _ := h.sh(sb.ID, "cat /f; hostname"); out != "kept\n"+string(sb.ID)+"\n" {
		t.Errorf("in the copy: %q", out)
	}
	counted(sb.ID, max(before, count(sb.ID)))
	if sb.Spec.Tier != dsec.TierMicroVM || sb.Spec.Checkpoint != made.Digest || sb.Spec.Network != dsec.NetworkOpen {
		t.Errorf("%+v", sb.Spec)
	}
	if _, err := h.Create(t.Context(), dsec.Spec{Checkpoint: "sha256:" + strings.Repeat("0", 64)}); dsec.ClassOf(err) != dsec.NotFound {
		t.Errorf("one that is not there: %v", err)
	}
	kind.Tier = dsec.TierContainer
	plain := h.create(nil)
	if _, err := h.Checkpoint(t.Context(), plain, 0); dsec.ClassOf(err) != dsec.Unsupported || !strings.Contains(err.Error(), "container") {
		t.Errorf("a container: %v", err)
	}
	for _, id := range []dsec.SandboxID{sb.ID, plain} {
		if existed, err := h.Delete(t.Context(), id); err != nil || !existed {
			t.Errorf("%v, %v", existed, err)
		}
	}
}

package machine

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/opendsec/dsec"
)

// registry has a project with a release on each side of 2025-01-31.
func registry(t *testing.T) *httptest.Server {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var files []map[string]any
		for version, at := range map[string]string{"1.0": "2024-06-01T00:00:00Z", "2.0": "2025-06-01T00:00:00Z"} {
			files = append(files, map[string]any{"filename": "demo-" + version + ".tar.gz", "url": "http://" + r.Host + "/x", "upload-time": at,
				"hashes": map[string]string{"sha256": strings.Repeat("0", 64)}})
		}
		_ = json.NewEncoder(w).Encode(map[string]any{"name": "demo", "files": files})
	}))
	t.Cleanup(s.Close)
	return s
}

// TestASandboxSeesPackagesAsOfItsCutoff: by the names and the environment it has,
// also after the agent, or the mirror, was killed; and reaches nothing else.
func TestASandboxSeesPackagesAsOfItsCutoff(t *testing.T) {
	dir, err := os.MkdirTemp("/var/tmp", "dsec-e2e-")
	if err != nil {
		t.Fatal(err)
	}
	h := startWith(t, dir, "", fmt.Sprintf("packages: {pypi: '%s'}", registry(t).URL))
	old := h.create(func(s *dsec.Spec) {
		s.Network, s.Cutoff = dsec.NetworkMirror, time.Date(2025, 1, 31, 0, 0, 0, 0, time.UTC)
	})
	now := h.create(func(s *dsec.Spec) { s.Network, s.Allow = dsec.NetworkAllow, []dsec.NetworkRule{{Mirror: "pypi"}} })
	denied := h.create(func(s *dsec.Spec) { s.Network, s.MirrorDeny = dsec.NetworkMirror, []string{"pypi:Demo"} })
	const get = "/bin/busybox wget -qO- ${PIP_INDEX_URL}demo/ 2>&1"
	sees := func(when string) {
		t.Helper()
		eventually(t, "packages are served "+when, func() bool { out, _ := h.sh(old, get); return strings.Contains(out, "demo-1.0") })
		for id, want := range map[dsec.SandboxID]string{old: "10", now: "11", denied: "00"} {
			out, _ := h.sh(id, get)
			has := func(s string) string { return map[bool]string{true: "1", false: "0"}[strings.Contains(out, s)] }
			if got := has("demo-1.0") + has("demo-2.0"); got != want {
				t.Errorf("%s: sees %s, want %s: %s", when, got, want, out)
			}
		}
	}
	sees("at first")
	if out, _ := h.sh(denied, get); !strings.Contains(out, "403") {
		t.Errorf("a denied name: %s", out)
	}
	if out, _ := h.sh(old, refused); !notPermitted.MatchString(out) || !strings.Contains(out, "NXDOMAIN") {
		t.Errorf("what else: %s", out)
	}
	h.Kill("packages")
	sees("by the next mirror")
	h.Kill("node")
	eventually(t, "the next agent answers", func() bool { _, err := h.Get(t.Context(), old); return err == nil })
	sees("with the next agent")
	h.cli("network", string(old), "allow-list", "--allow", "mirror:pypi")
	sees("after a change of the policy")
	h.cli("network", string(old), "none")
	if out, _ := h.sh(old, "/bin/busybox wget -T 3 -qO- http://pypi.mirror.dsec/simple/demo/ 2>&1"); strings.Contains(out, "demo") {
		t.Errorf("with the mode none: %s", out)
	}
}

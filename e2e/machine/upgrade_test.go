package machine

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/process"
)

// otherBinary is dsec with another dsec-hold inside.
func otherBinary(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	name, err := filepath.Abs("../../internal/embedded/bin/dsec-hold-" + runtime.GOARCH)
	if err != nil {
		t.Fatal(err)
	}
	hold, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	other, overlay := filepath.Join(dir, "hold"), filepath.Join(dir, "overlay.json")
	if err := os.WriteFile(other, append(hold, 0), 0o755); err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(map[string]map[string]string{"Replace": {name: other}})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(overlay, text, 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("go", "build", "-overlay", overlay, "-o", filepath.Join(dir, "dsec"), "../../cmd/dsec")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build dsec: %v\n%s", err, out)
	}
	return filepath.Join(dir, "dsec")
}

// TestNewVersionUpgradesTheHold: dsec is stopped and another one started, which
// brings another dsec-hold; the sandboxes and their commands run on.
func TestNewVersionUpgradesTheHold(t *testing.T) {
	second := otherBinary(t)
	h := start(t)
	id := h.create(nil)
	p, err := h.Exec(t.Context(), id, process.Spec{Argv: []string{"/bin/sh", "-c", counting}})
	if err != nil {
		t.Fatal(err)
	}
	pid := h.holdPID()
	h.Quit(syscall.SIGTERM)
	h.Binary = second
	h.Serve()
	if h.Log.Count("the hold was upgraded") != 1 || h.holdPID() != pid {
		t.Fatalf("the hold is %d, was %d\n%s", h.holdPID(), pid, h.Log)
	}
	eventually(t, "the sandbox is running", func() bool { return h.states(t.Context())[id] == dsec.Running })
	var out bytes.Buffer
	r, err := p.Follow(t.Context(), client.Offsets{}, func(c client.Chunk) error {
		if c.Stream == process.Stdout && c.Offset != int64(out.Len()) && len(c.Data) > 0 {
			return fmt.Errorf("output jumps from %d to %d", out.Len(), c.Offset)
		}
		out.Write(c.Data)
		return nil
	})
	if err != nil || r.ExitCode != 7 || r.Status != process.Exited || strings.Count(out.String(), "\n") != 300 {
		t.Fatalf("%+v, %v, %d lines of 300", r, err, strings.Count(out.String(), "\n"))
	}
	if out, r := h.sh(id, "echo again"); out != "again\n" || r.ExitCode != 0 {
		t.Errorf("after the upgrade: %q, %+v", out, r)
	}
}

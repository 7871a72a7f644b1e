package adversary

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opendsec/dsec"
)

// cli runs the command line as its user does and returns all it printed.
func (h *host) cli(t *testing.T, args ...string) []byte {
	t.Helper()
	cmd := exec.Command(binary, args...)
	cmd.Env = append(os.Environ(), "DSEC_SOCKET="+filepath.Join(h.Dir, "run", "gateway.sock"))
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Logf("dsec %q: %v", args, err)
	}
	return out
}

// escape would retitle the window, clear the screen by both kinds of controls, turn
// the line around, and overwrite it.
const escape = "x\x1b]0;owned\a\x1b[2J\u009b2J\u202ey\rz"

// namesCommandNoTerminal: whatever a sandbox or who made it can have the command
// line print, a terminal shows it. What commands write is theirs: it passes as it is.
func namesCommandNoTerminal(t *testing.T, h *host) {
	id := string(h.create(t, func(s *dsec.Spec) {
		s.Name, s.Labels, s.RolloutKey = "", map[string]string{"l": escape}, escape
		s.Env = map[string]string{"E": escape}
	}))
	if sb, err := h.Create(t.Context(), dsec.Spec{Tier: dsec.TierContainer, Image: "hostile", Name: escape, Limits: dsec.Limits{Memory: 64 << 20, Disk: 64 << 20}}); err == nil {
		defer func() { _, _ = h.Delete(t.Context(), sb.ID) }() // its name is in the list
	}
	h.cli(t, "exec", id, "--", "/bin/sh", "-c", "mkdir \"/tmp/$1\"; echo >\"/tmp/$1/f\"", "sh", escape)
	for _, args := range [][]string{
		{"ps"}, {"ps", "-a"}, {"ps", "-o", "json"}, {"why", id}, {"why", id, "-o", "json"}, {"events", id}, {"events", id, "-o", "json"}, {"diff", id}, {"diff", id, "-o", "json"},
		{"stat", id}, {"exec", id, "--", "/no/" + escape}, {"exec", id, "--cwd", "/no/" + escape, "--", "true"}, {"exec", id, "--user", escape, "--", "true"},
		{"cp", id + ":/tmp/no" + escape, "/dev/null/x"}, {"why", escape}, {"rm", escape}, {"create", escape}, {"layer", "inspect", escape}, {"network", id},
	} {
		out := h.cli(t, args...)
		if len(out) == 0 {
			t.Errorf("dsec %q prints nothing", args)
		}
		if i := bytes.IndexAny(out, "\x1b\a\u009b\u202e\r"); i >= 0 {
			t.Errorf("dsec %q commands the terminal at %q", args, out[max(0, i-40):min(len(out), i+20)])
		}
	}
	// The positive control: it is there, and what commands write is theirs.
	if out := h.cli(t, "exec", id, "--", "/bin/ls", "/tmp"); !bytes.Contains(out, []byte("x")) {
		t.Errorf("no such name: %q", out)
	}
	if out := h.cli(t, "exec", id, "--", "/bin/echo", escape); !strings.Contains(string(out), "\x1b") {
		t.Errorf("output of a command is changed: %q", out)
	}
	if out := h.cli(t, "why", id); !bytes.Contains(out, []byte("owned")) {
		t.Errorf("the name is not shown: %q", out)
	}
}

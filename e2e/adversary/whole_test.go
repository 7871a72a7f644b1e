package adversary

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/process"
)

// sh runs a shell command to its end and returns what it printed.
func (h *host) sh(t *testing.T, id dsec.SandboxID, script string) string {
	t.Helper()
	var out bytes.Buffer
	if _, err := h.Run(t.Context(), id, process.Spec{Argv: []string{"/bin/sh", "-c", script}, Timeout: time.Minute}, &out, &out); err != nil {
		t.Fatalf("%s: %v", script, err)
	}
	return out.String()
}

func (h *host) code(t *testing.T, id dsec.SandboxID, script string) int {
	t.Helper()
	r, err := h.Run(t.Context(), id, process.Spec{Argv: []string{"/bin/sh", "-c", script}, Timeout: time.Minute}, nil, nil)
	if err != nil {
		t.Fatalf("%s: %v", script, err)
	}
	return r.ExitCode
}

// state is what of the machine must stay as it is.
type state struct {
	node, hold int
	settings   map[string]string
	oopses     int
}

// settings are what an adversary would change first.
var settings = []string{"core_pattern", "modprobe", "hostname", "randomize_va_space", "kptr_restrict", "dmesg_restrict", "sysrq", "unprivileged_bpf_disabled"}

func (h *host) look(t *testing.T) state {
	t.Helper()
	s := state{node: h.Child("node"), hold: h.holdPID(t), settings: map[string]string{}}
	for _, name := range settings {
		if b, err := os.ReadFile("/proc/sys/kernel/" + name); err == nil {
			s.settings[name] = string(b)
		}
	}
	log, err := exec.Command("dmesg").Output()
	if err != nil {
		t.Logf("the kernel's log is not looked at: %v", err)
	}
	s.oopses = len(regexp.MustCompile(`(?m)BUG:|Oops|general protection|soft lockup|WARNING: CPU|hung_task|blocked for more than`).FindAll(log, -1))
	return s
}

// unchanged wants the machine to be as before, its agent and hold the same, alive,
// and not restarted.
func (h *host) unchanged(t *testing.T, before state) {
	t.Helper()
	now := h.look(t)
	if fmt.Sprint(now) != fmt.Sprint(before) {
		t.Errorf("the machine was %+v and is %+v", before, now)
	}
	for _, pid := range []int{now.node, now.hold} {
		if err := syscall.Kill(pid, 0); err != nil {
			t.Errorf("process %d: %v", pid, err)
		}
	}
	if log := h.Log.String(); strings.Contains(log, "panic") {
		t.Errorf("a panic:\n%s", log)
	}
}

func (h *host) holdPID(t *testing.T) int {
	t.Helper()
	all, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range all {
		b, err := os.ReadFile(name)
		var pid int
		if err == nil && bytes.Contains(b, []byte(h.Dir+"/run/hold")) && bytes.Contains(b, []byte("hold")) {
			if _, err := fmt.Sscanf(name, "/proc/%d/", &pid); err == nil {
				return pid
			}
		}
	}
	t.Fatal("no hold runs")
	return 0
}

// neighbour is a sandbox that does nothing wrong: it has a file, a process with a
// secret, and the layers of the others.
type neighbour struct {
	h  *host
	id dsec.SandboxID
	s  string // its process
}

func (h *host) neighbour(t *testing.T) *neighbour {
	t.Helper()
	n := &neighbour{h: h, id: h.create(t, nil)}
	p, err := h.Exec(t.Context(), n.id, process.Spec{Argv: []string{"/bin/sh", "-c", "exec sleep 600", "neighbours-secret"}})
	if err != nil {
		t.Fatal(err)
	}
	n.s = p.ID
	h.sh(t, n.id, "echo mine >/tmp/file; echo mine >/dev/shm/file")
	return n
}

// check wants everything of it as it was.
func (n *neighbour) check(t *testing.T) {
	t.Helper()
	const want = "mine\nmine\nsharedshared"
	if got := n.h.sh(t, n.id, "cat /tmp/file /dev/shm/file /evil/shared /evil/page"); got != want {
		t.Errorf("the neighbour has %q, want %q", got, want)
	}
	for _, e := range n.h.events(t, n.id) {
		if e.Type == dsec.EventExecExited && e.Exec == n.s {
			t.Errorf("the neighbour's process has ended: %+v", e)
		}
	}
	if sb, err := n.h.Get(t.Context(), n.id); err != nil || sb.State != dsec.Running {
		t.Errorf("the neighbour is %s, %v", sb.State, err)
	}
}

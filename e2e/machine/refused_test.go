package machine

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/opendsec/dsec"
)

// What the kernel refused a sandbox is evidence, also of a time when no agent was there.
func TestRefusedSystemCallsAreShown(t *testing.T) {
	t.Parallel()
	h := start(t)
	id := h.create(nil)
	shown := func(detail string) bool {
		for line := range strings.Lines(h.cli("audit", string(id), "--kind", "syscall", "-o", "json")) {
			var r dsec.AuditRecord
			if err := json.Unmarshal([]byte(line), &r); err != nil {
				t.Fatalf("%v: %s", err, line)
			}
			if r.Detail == detail && r.Kind == dsec.AuditSyscall && r.Exe == "/bin/busybox" && r.Exec != "" && r.UID == 0 && r.PID > 1 {
				return true
			}
		}
		return false
	}
	if out, r := h.sh(id, "busybox mount -t tmpfs none /tmp"); r.ExitCode == 0 {
		t.Fatalf("a mount was made: %s", out)
	}
	eventually(t, "the mount is shown", func() bool { return shown("mount: EPERM") })
	h.sh(id, "(while ! test -e /tmp/go; do usleep 10000; done; busybox unshare -n true; touch /tmp/went) >/dev/null 2>&1 &")
	h.sh(id, "(usleep 300000; touch /tmp/go) >/dev/null 2>&1 &")
	h.Kill("node")
	eventually(t, "the sandbox is running again", func() bool { return h.states(t.Context())[id] == dsec.Running })
	eventually(t, "what happened without an agent is shown", func() bool { return shown("unshare new namespace 0x40000000: EPERM") })
	if _, r := h.sh(id, "test -e /tmp/went"); r.ExitCode != 0 {
		t.Errorf("it is not over: %+v", r)
	}
	if table := h.cli("audit", string(id), "--kind", "syscall"); !strings.Contains(table, "mount: EPERM  by /bin/busybox") {
		t.Errorf("%s", table)
	}
}

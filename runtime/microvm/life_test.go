package microvm

import (
	"strings"
	"testing"
)

// A sandbox is a machine of its own, made of layers, with its limits and its names.
func TestSandboxIsAMachine(t *testing.T) {
	w := newWorld(t)
	id := w.create(t)
	o := w.run(t, id, "uname -r; hostname; cat /etc/hostname /proc/sys/kernel/random/boot_id; id -u; ls /; mount; cat /proc/meminfo | head -3; df -k / 2>/dev/null; cat /proc/cmdline; date +%s")
	t.Logf("%s%s", o.stdout, o.stderr)
	if o.ExitCode != 0 || !strings.Contains(o.stdout, string(id)) {
		t.Errorf("%+v", o)
	}
}

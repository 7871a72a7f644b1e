package qemu

import (
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/runtime/microvm/vmm"
)

// A machine boots from nothing, sees what is in its slots, and keeps the rules.
func TestColdStart(t *testing.T) {
	g := theGuest(t)
	dev := g.devices(t, "layer")
	m, err := g.driver.Start(ctxOf(t), g.shape, dev)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.Kill)
	began := time.Now()
	if err := m.(*machine).settle(ctxOf(t), ready, time.Minute); err != nil {
		t.Fatal(err)
	}
	t.Logf("booted in %v", time.Since(began).Round(time.Millisecond))
	want(t, m, "ping", "pong")
	want(t, m, "read /dev/pmem0 0", hexOf("layer"))
	want(t, m, "read /dev/pmem1 0", hexOf(""))
	want(t, m, "read /dev/vda 0", hexOf("disk layer"))
	want(t, m, "write /dev/vda 4096 written", "ok")
	want(t, m, "cat /sys/class/net/eth0/address", mac)
	t.Logf("write to a layer: %s", ask(t, m, "write /dev/pmem0 0 hacked!!"))
	walls(t, m.(*machine))
	snapshot := filepath.Join(t.TempDir(), "snapshot")
	want(t, m, "set word", "ok")
	if err := m.Snapshot(ctxOf(t), snapshot); err != nil {
		t.Error(err)
	}
	pss, err := m.Memory()
	if err != nil || pss < 32<<20 || pss > 1<<30 {
		t.Errorf("memory %d, %v", pss, err)
	}
	if err := m.Stop(t.Context()); err != nil {
		t.Error(err)
	}
	<-m.Done()
	if m.Err() != nil {
		t.Errorf("after Stop: %v", m.Err())
	}
	again, err := g.driver.Restore(ctxOf(t), snapshot, dev)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(again.Kill)
	if err := again.Resume(ctxOf(t)); err != nil {
		t.Fatal(err)
	}
	want(t, again, "get", "word")
	again.Kill()
	for name, text := range map[string]string{dev.Disk: "written", dev.Pmem[0]: "layer"} {
		b, err := os.ReadFile(name)
		if err != nil || !strings.Contains(string(b), text) || strings.Contains(string(b), "hacked") {
			t.Errorf("%s: %v, no %q, or it was written", filepath.Base(name), err, text)
		}
	}
	if _, err := m.Memory(); dsec.ClassOf(err) != dsec.SandboxGone {
		t.Errorf("memory of an ended machine: %v", err)
	}
	wantClass(t, m.Pause(t.Context()), dsec.SandboxGone, "")
	if err := m.Stop(t.Context()); err != nil {
		t.Errorf("a second Stop: %v", err)
	}
	if left := qemus(t); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// walls looks at the process as the kernel sees it.
func walls(t *testing.T, m *machine) {
	t.Helper()
	dir := "/proc/" + strconv.Itoa(m.proc.Pid())
	text, err := os.ReadFile(dir + "/status")
	if err != nil {
		t.Fatal(err)
	}
	fields := map[string]string{}
	for l := range strings.Lines(string(text)) {
		k, v, _ := strings.Cut(l, ":")
		fields[k] = strings.Join(strings.Fields(v), " ")
	}
	uid, _, _ := strings.Cut(fields["Uid"], " ")
	if n, err := strconv.Atoi(uid); err != nil || n < testUID || n > testUID+4095 || strings.Join(strings.Fields(fields["Gid"]), " ") != strings.Join([]string{uid, uid, uid, uid}, " ") {
		t.Errorf("user %s, groups %s", fields["Uid"], fields["Gid"])
	}
	for k, v := range map[string]string{"CapPrm": "0000000000000000", "CapEff": "0000000000000000", "CapAmb": "0000000000000000",
		"NoNewPrivs": "1", "Seccomp": "2", "Uid": strings.Join([]string{uid, uid, uid, uid}, " "), "Groups": ""} {
		if fields[k] != v {
			t.Errorf("%s of QEMU is %q, want %q", k, fields[k], v)
		}
	}
	for _, ns := range []string{"net", "ipc", "uts"} {
		a, err := os.Readlink(dir + "/ns/" + ns)
		b, _ := os.Readlink("/proc/self/ns/" + ns)
		if err != nil || a == b {
			t.Errorf("namespace %s of QEMU: %s, ours %s, %v", ns, a, b, err)
		}
	}
	fds, err := os.ReadDir(dir + "/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, fd := range fds {
		to, err := os.Readlink(dir + "/fd/" + fd.Name())
		if err == nil && (strings.HasPrefix(to, "/") && !strings.HasPrefix(to, "/memfd:") && to != "/dev/null" && !strings.HasPrefix(to, "/tmp/") &&
			!strings.Contains(to, "/.cache/vm/")) {
			t.Errorf("QEMU has %s open", to)
		}
	}
	// A socket that others could reach has a name or a port.
	unixSockets, err := os.ReadFile(dir + "/net/unix")
	if err != nil || strings.Count(string(unixSockets), "\n") != 1 {
		t.Errorf("sockets of its network namespace: %v\n%s", err, unixSockets)
	}
}

type caseOf struct {
	vmm.Shape
	vmm.Devices
}

func TestWhatDoesNotFitIsRefused(t *testing.T) {
	g := theGuest(t)
	dir := t.TempDir()
	dev := g.devices(t, "x")
	start := func(class dsec.Class, text string, change func(d *caseOf)) {
		t.Helper()
		c := caseOf{g.shape, dev}
		c.Shape.Pmem, c.Devices.Pmem = slices.Clone(c.Shape.Pmem), slices.Clone(c.Devices.Pmem)
		change(&c)
		m, err := g.driver.Start(ctxOf(t), c.Shape, c.Devices)
		if err == nil {
			m.Kill()
		}
		wantClass(t, err, class, text)
	}
	start(dsec.Invalid, "2 MiB", func(c *caseOf) { c.Shape.Pmem[0] = 1 << 20 })
	start(dsec.Invalid, "2 MiB", func(c *caseOf) { c.Shape.Pmem[0] = 4<<20 + 4096 })
	odd := filepath.Join(dir, "odd")
	sized(t, odd, 4<<20-4096, "")
	start(dsec.Invalid, "its slot", func(c *caseOf) { c.Devices.Pmem[0] = odd })
	start(dsec.Invalid, "its place", func(c *caseOf) { c.Devices.Disk = odd })
	start(dsec.NotFound, "no such file", func(c *caseOf) { c.Devices.Pmem[0] = odd + "?" })
	start(dsec.Invalid, "regular", func(c *caseOf) { c.Devices.Pmem[0] = dir })
	start(dsec.Invalid, "for 2 slots", func(c *caseOf) { c.Devices.Pmem = []string{"", "", ""} })
	start(dsec.Invalid, "disk", func(c *caseOf) { c.Devices.Disk = "" })
	start(dsec.Invalid, "command line", func(c *caseOf) { c.Shape.Append = "a\nb" })
	kernel, err := os.ReadFile(g.shape.Kernel.Path)
	if err != nil {
		t.Fatal(err)
	}
	short := filepath.Join(dir, "vmlinux")
	if err := os.WriteFile(short, kernel[:len(kernel)/2], 0o644); err != nil {
		t.Fatal(err)
	}
	start(dsec.Corrupt, "digest", func(c *caseOf) { c.Shape.Kernel.Path = short })
	// One that was truncated before its digest was taken does not boot.
	if err := os.WriteFile(short, kernel[:20000], 0o644); err != nil {
		t.Fatal(err)
	}
	start(dsec.Unavailable, "QEMU ended", func(c *caseOf) { c.Shape.Kernel = fileOf(short) })
	if left := qemus(t); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

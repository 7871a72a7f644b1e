package qemu

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/opendsec/dsec"
)

// asRoot is for machines whose KVM belongs to root alone: the probe has to find out
// more about it than that it may not be opened.
func asRoot(cmd *exec.Cmd) { cmd.SysProcAttr.Credential = &syscall.Credential{} }

// Whatever KVM of this machine is: a probe says so in time, says it again without
// trying, and what it says is what machines are started with.
func TestProbe(t *testing.T) {
	g := theGuest(t)
	for name, prepare := range map[string]func(*exec.Cmd){"own user": nil, "root": asRoot} {
		starts := 0
		direct := Direct(prepare)
		cfg := Config{Dir: t.TempDir(), UID: testUID, Spawn: func(c Command) (Process, error) { starts++; return direct(c) }}
		d, err := New(t.Context(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		caps, err := d.Probe(ctxOf(t), g.shape, ready)
		took := time.Since(began)
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("%s: %s in %v: %s", name, caps.Accel, took.Round(time.Millisecond), caps.NoKVM)
		if (caps.Accel == kvm) != (caps.NoKVM == "") || (caps.Accel == tcg && !strings.HasPrefix(caps.NoKVM, "no KVM: ")) || took > 3*kvmTime {
			t.Errorf("%+v after %v", caps, took)
		}
		if left := qemus(t); len(left) > 0 {
			t.Errorf("left: %v", left)
		}
		if d.accelOf(g.shape.Kernel.SHA256) != caps.Accel {
			t.Error("it is not what is used")
		}
		// Another process of the same boot does not try again.
		tried := starts
		e, err := New(t.Context(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		again, err := e.Probe(ctxOf(t), g.shape, ready)
		if err != nil || again != caps || (starts != tried) == conclusive(caps.NoKVM) {
			t.Errorf("%+v, %v, %d starts", again, err, starts-tried)
		}
		if _, err := os.Stat(kvmDevice); err == nil && tried != 1 {
			t.Errorf("%d starts for one probe", tried)
		}
	}
}

// Where KVM works, or hangs: the same guest under another accelerator stands for it.
func TestProbeOfKVMThatWorksAndOfOneThatHangs(t *testing.T) {
	g := theGuest(t)
	if _, err := os.Stat(kvmDevice); err != nil {
		t.Skip(err)
	}
	direct := Direct(nil)
	emulated := func(c Command) (Process, error) {
		for i, a := range c.Args {
			switch a {
			case "kvm":
				c.Args[i] = "tcg,tb-size=64"
			case "host":
				c.Args[i] = "max"
			}
		}
		return direct(c)
	}
	d, err := New(t.Context(), Config{Dir: t.TempDir(), UID: testUID, Spawn: emulated})
	if err != nil {
		t.Fatal(err)
	}
	d.probeTime = 30 * time.Second
	caps, err := d.Probe(ctxOf(t), g.shape, ready)
	if err != nil || caps.Accel != kvm || caps.NoKVM != "" || d.accelOf(g.shape.Kernel.SHA256) != kvm {
		t.Errorf("%+v, %v", caps, err)
	}
	// What was a template of emulation is none of KVM's.
	key := d.identity(line{accel: kvm, shape: g.shape}).key()
	if key == g.template(t).Key {
		t.Error("one template for both accelerators")
	}
	if d, err = New(t.Context(), Config{Dir: t.TempDir(), UID: testUID, Spawn: emulated}); err != nil {
		t.Fatal(err)
	}
	d.probeTime = 300 * time.Millisecond
	began := time.Now()
	caps, err = d.Probe(ctxOf(t), g.shape, ready)
	if err != nil || caps.Accel != tcg || !strings.Contains(caps.NoKVM, "not ready within 300ms") || time.Since(began) > 5*time.Second {
		t.Errorf("%+v, %v after %v", caps, err, time.Since(began))
	}
	if known := d.known(); len(known) != 1 {
		t.Errorf("kept: %+v", known)
	}
	// The caller going away is no answer, and neither is a kernel that is not there.
	if d, err = New(t.Context(), Config{Dir: t.TempDir(), UID: testUID, Spawn: emulated}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	_, err = d.Probe(ctx, g.shape, ready)
	wantClass(t, err, dsec.Timeout, "")
	gone := g.shape
	gone.Kernel.Path += "?"
	_, err = d.Probe(ctxOf(t), gone, ready)
	wantClass(t, err, dsec.NotFound, "no such")
	if known := d.known(); len(known) != 0 {
		t.Errorf("kept: %+v", known)
	}
	if left := qemus(t); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// What is kept is of one boot, one QEMU, one kernel and one user.
func TestWhatAProbeFoundIsKeptForThisBootOnly(t *testing.T) {
	d := &Driver{cfg: Config{Dir: t.TempDir()}}
	id, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		t.Fatal(err)
	}
	now := probed{Format: format, BootID: strings.TrimSpace(string(id)), QEMU: "7", Kernel: "k", NoKVM: "why"}
	earlier := now
	earlier.BootID = "00000000-0000-0000-0000-000000000000"
	newer := now
	newer.Format++
	if err := d.remember([]probed{earlier, now, newer}); err != nil {
		t.Fatal(err)
	}
	if got := d.known(); len(got) != 1 || got[0] != now {
		t.Errorf("%+v", got)
	}
	for _, text := range []string{"", "{", "[{\"format\": 1, \"x\": 2}]", strings.Repeat(" ", maxManifest+1)} {
		if err := os.WriteFile(filepath.Join(d.cfg.Dir, "kvm.json"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if got := d.known(); len(got) != 0 {
			t.Errorf("%.20s: %+v", text, got)
		}
	}
	if names := list(t, d.cfg.Dir); len(names) != 1 {
		t.Errorf("left: %v", names)
	}
	d.cfg.NoKVM = true
	if why, err := d.noKVM(t.Context(), fullShape(), ready); err != nil || why != "it is switched off" {
		t.Errorf("%q, %v", why, err)
	}
}

// A machine of another accelerator, or another QEMU, is refused.
func TestStatesOfOthersAreRefused(t *testing.T) {
	g := theGuest(t)
	for name, change := range map[string]func(*identity){
		"command line": func(i *identity) { i.Line = strings.Repeat("0", 64) },
		"QEMU":         func(i *identity) { i.QEMU = "QEMU emulator version 99.9" },
	} {
		d, tp := damaged(t, g, func(dir string, man *manifest) {
			change(&man.Identity)
			if err := os.Rename(dir, filepath.Join(filepath.Dir(dir), man.Identity.key())); err != nil {
				t.Fatal(err)
			}
			if err := os.Mkdir(dir, 0o755); err != nil { // for the manifest
				t.Fatal(err)
			}
		})
		entries := list(t, d.cfg.Dir)
		for _, e := range entries {
			if e == tp.Key {
				continue
			}
			text, err := os.ReadFile(filepath.Join(d.cfg.Dir, tp.Key, "manifest.json"))
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(d.cfg.Dir, e, "manifest.json"), text, 0o644); err != nil {
				t.Fatal(err)
			}
			tp.Key = e
			break
		}
		m, err := d.Clone(ctxOf(t), tp, g.devices(t, "x"))
		if err == nil {
			m.Kill()
			t.Fatalf("%s: it was cloned", name)
		}
		wantClass(t, err, dsec.Unsupported, "it is of")
	}
}

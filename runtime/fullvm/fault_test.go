package fullvm

import (
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/diskimage"
	"github.com/opendsec/dsec/internal/leak"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/process"
	"github.com/opendsec/dsec/runtime"
	"github.com/opendsec/dsec/runtime/runtimetest"
)

func withMain(argv ...string) func(*runtime.Request) {
	return func(r *runtime.Request) { r.Spec.Command = argv }
}

// exitOf waits for the end of a sandbox that nobody asked for.
func (w *world) exitOf(t *testing.T, id dsec.SandboxID) runtime.Exit {
	t.Helper()
	return runtimetest.ExitOf(t, w.r, id)
}

func (w *world) faults(disk layer.Local) runtimetest.Faults {
	return runtimetest.Faults{Runtime: func() runtime.Runtime { return w.r }, Prefix: "fullvm.", Last: "create.made.", Try: runtimetest.Behind,
		Request: func(*testing.T) runtime.Request { return request(disk, small) }, Empty: func(t *testing.T) { t.Helper(); w.wantNothing(t) }}
}

func TestFaultAtEveryStepLeavesNothing(t *testing.T) {
	w, disk := newWorld(t), tiny(t)
	must(t, w.r.Destroy(t.Context(), w.create(t, request(disk, small)).id)) // what is made once for all is there
	before := leak.Take(w.name)
	w.faults(disk).Create(t)
	runtimetest.WantNothingSince(t, w.name, before)
}

func TestFaultAtEveryStepOfAStartLeavesItStopped(t *testing.T) {
	w, disk := newWorld(t), tiny(t)
	b := w.create(t, request(disk, small))
	must(t, w.r.Stop(t.Context(), b.id, 0))
	w.faults(disk).Start(t, b.id, func(t *testing.T) {
		if groups, err := w.groups.List(); err != nil || len(groups) > 0 {
			t.Errorf("control groups %v %v", groups, err)
		}
		if all, err := w.driver.Names(t.Context()); err != nil || len(all) > 0 {
			t.Errorf("machines %v %v", all, err)
		}
	})
	b.says("R")
}

// TestAgentIsKilledAtEveryStep of a creation: the next one leaves nothing of it, or goes on with what was whole.
func TestAgentIsKilledAtEveryStep(t *testing.T) {
	w, disk := newWorld(t), tiny(t)
	agent := func(t *testing.T, at string, id dsec.SandboxID) *exec.Cmd {
		req := request(disk, small, func(r *runtime.Request) { r.ID, r.Layers.Lease = id, string(id) })
		text, err := json.Marshal(agentJob{w.dir, w.name, at, req})
		must(t, err)
		cmd := exec.Command("/proc/self/exe")
		cmd.Env = append(os.Environ(), "DSEC_TEST_AGENT="+string(text))
		return cmd
	}
	w.faults(disk).Kill(t, agent, func() { w.close(t) }, func() { w.open(t) })
}

// TestKilledMonitorIsNobodysFault: nobody knows why it ended, its commands end with it, and its disk is as after a
// loss of power.
func TestKilledMonitorIsNobodysFault(t *testing.T) {
	w := newWorld(t)
	b := w.create(t, request(smallLayer(t), modest))
	b.run("echo kept >/root/f; sync")
	p, err := w.r.Exec(b.ctx(), b.id, process.Spec{Argv: []string{"sleep", "300"}})
	must(t, err)
	must(t, syscall.Kill(b.pid(), syscall.SIGKILL))
	if x := w.exitOf(t, b.id); x.Cause != dsec.CauseUnknown || x.By != dsec.InducedByUnknown || len(x.Evidence) == 0 {
		t.Errorf("%+v", x)
	}
	if _, err := p.Wait(b.ctx()); dsec.ClassOf(err) != dsec.SandboxGone {
		t.Errorf("its command: %v", err)
	}
	_, err = w.r.Start(t.Context(), b.id)
	must(t, err)
	if out := b.run("cat /root/f"); out != "kept\n" {
		t.Errorf("%q", out)
	}
}

// TestKilledGuestAgent takes commands with it. The machine goes on, and another agent of it serves; a sandbox that has a
// main command has lost what it is for.
func TestKilledGuestAgent(t *testing.T) {
	w := newWorld(t)
	disk := smallLayer(t)
	b := w.create(t, request(disk, modest))
	life := b.run("cat /proc/sys/kernel/random/boot_id")
	p, err := w.r.Exec(b.ctx(), b.id, process.Spec{ID: "lost", Argv: []string{"sleep", "300"}})
	must(t, err)
	b.kill9Agent()
	if res, err := p.Wait(b.ctx()); dsec.ClassOf(err) != dsec.NotFound {
		t.Errorf("a command of the agent that was killed: %+v, %v", res, err)
	}
	if out := b.run("cat /proc/sys/kernel/random/boot_id"); out != life {
		t.Error("the machine began anew with its agent")
	}
	if _, err := w.r.Process(b.ctx(), b.id, "lost"); dsec.ClassOf(err) != dsec.NotFound {
		t.Errorf("it is known still: %v", err)
	}
	must(t, w.r.Destroy(b.ctx(), b.id))
	b = w.create(t, request(disk, modest, withMain("sleep", "1000")))
	b.kill9Agent()
	if x := w.exitOf(t, b.id); x.Cause != dsec.CauseAgentDamage || x.By != dsec.InducedBySelf {
		t.Errorf("%+v", x)
	}
	must(t, w.r.Destroy(b.ctx(), b.id))
	w.wantNothing(t)
}

// kill9Agent has root of the machine kill its agent, which it may.
func (b *box) kill9Agent() {
	b.t.Helper()
	const script = `for p in /proc/[0-9]*; do case $(tr '\0' ' ' <$p/cmdline) in "/usr/sbin/dsec-guest service"*) kill -9 ${p#/proc/};; esac; done`
	_, err := b.r.Exec(b.ctx(), b.id, process.Spec{Argv: []string{"/bin/sh", "-c", script}})
	must(b.t, err)
}

// TestKilledHoldEndsMachines, and every agent says so.
func TestKilledHoldEndsMachines(t *testing.T) {
	w := newWorld(t)
	b := w.create(t, request(tiny(t), small))
	must(t, syscall.Kill(w.hold.Info().PID, syscall.SIGKILL))
	if x := w.exitOf(t, b.id); x.Cause != dsec.CauseInfraNodeLost || x.By != dsec.InducedByPlatform {
		t.Errorf("%+v", x)
	}
	must(t, w.r.Close())
	w.driver.Close()
	must(t, w.mounts.Close())
	must(t, w.disks.Close())
	_ = w.hold.Close() // the other end is gone
	must(t, w.groups.Close())
	w.open(t)
	if x := w.exitOf(t, b.id); x.Cause != dsec.CauseInfraNodeLost {
		t.Errorf("after the restart: %+v", x)
	}
	must(t, w.r.Destroy(b.ctx(), b.id))
}

// TestDiskThatDoesNotBoot says so in time, with what the console said, and leaves nothing.
func TestDiskThatDoesNotBoot(t *testing.T) {
	w := newWorld(t, func(w *world) { w.agentTime = 3 * time.Second })
	agent := func(m *diskimage.Manifest) { m.Agent = true }
	cut := smallLayer(t)
	must(t, os.Truncate(cut.Data, 1<<20))
	for name, req := range map[string]runtime.Request{
		"a system without the agent that it says it has": request(tiny(t, agent), small),
		"an image of which a part is gone":               request(cut, modest),
	} {
		_, err := w.r.Create(t.Context(), req)
		if c := dsec.ClassOf(err); c != dsec.Timeout && c != dsec.Corrupt || !strings.Contains(err.Error(), string(req.ID)) {
			t.Errorf("%s: %v", name, err)
		}
		t.Log(err)
		w.wantNothing(t)
	}
}

// TestDamagedDiskOfAMark is found before the machine is killed.
func TestDamagedDiskOfAMark(t *testing.T) {
	w := newWorld(t)
	b := w.create(t, request(tiny(t), small))
	b.says("R")
	for what, damage := range map[string]func(mark string) error{
		"head":     func(mark string) error { return overwrite(filepath.Join(mark, diskFile), 0) },
		"length":   func(mark string) error { return os.Truncate(filepath.Join(mark, diskFile), 100) },
		"state":    func(mark string) error { return os.Truncate(filepath.Join(mark, "state"), 8192) },
		"manifest": func(mark string) error { return overwrite(filepath.Join(mark, "manifest.json"), 0) },
		"nothing":  func(mark string) error { return os.Remove(filepath.Join(mark, "manifest.json")) },
	} {
		must(t, w.r.Mark(b.ctx(), b.id, "m"))
		dir, err := w.disks.Open(b.ctx(), string(b.id))
		must(t, err)
		must(t, damage(inside(dir, "mark-m")))
		must(t, dir.Close())
		if err := w.r.Revert(b.ctx(), b.id, "m"); dsec.ClassOf(err) != dsec.Corrupt && (what != "nothing" || dsec.ClassOf(err) != dsec.NotFound) {
			t.Errorf("%s: %v, want corrupt", what, err)
		}
		b.types("x")
		b.says("x")
	}
}

func overwrite(name string, at int64) error {
	if err := os.Chmod(name, 0o600); err != nil {
		return err
	}
	f, err := os.OpenFile(name, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteAt([]byte("damage"), at)
	return errors.Join(err, f.Close())
}

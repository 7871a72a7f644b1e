package microvm

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/failpoint"
	"github.com/opendsec/dsec/internal/leak"
	"github.com/opendsec/dsec/process"
	"github.com/opendsec/dsec/runtime"
	"github.com/opendsec/dsec/runtime/microvm/vmm"
	"github.com/opendsec/dsec/runtime/runtimetest"
)

// long is for the full lengths.
var long = os.Getenv("DSEC_LONG") != ""

func withMain(argv ...string) func(*runtime.Request) {
	return func(r *runtime.Request) { r.Spec.Command = argv }
}

func (w *world) faults() runtimetest.Faults {
	return runtimetest.Faults{Runtime: func() runtime.Runtime { return w.r }, Prefix: "microvm.", Last: "create.main.after", Try: runtimetest.Behind,
		Request: func(*testing.T) runtime.Request {
			return request(withMain("sleep", "100"), func(r *runtime.Request) {
				if w.linked {
					r.Spec.Network = dsec.NetworkOpen
				}
			})
		},
		Empty: func(t *testing.T) { t.Helper(); w.nothingLeft(t) }}
}

func TestG5FaultAtEveryStepLeavesNothing(t *testing.T) {
	w := newWorld(t, linked)
	must(t, w.r.Destroy(t.Context(), w.create(t))) // what is made once for all is there
	before := leak.Take(w.name)
	w.faults().Create(t)
	runtimetest.WantNothingSince(t, w.name, before)
}

func TestG5FaultAtEveryStepOfAStartLeavesItStopped(t *testing.T) {
	w := newWorld(t)
	id := w.create(t)
	w.run(t, id, "echo kept > /f")
	must(t, w.r.Stop(t.Context(), id, 0))
	w.faults().Start(t, id, func(t *testing.T) {
		if groups, err := w.groups.List(); err != nil || len(groups) > 0 {
			t.Errorf("control groups %v %v", groups, err)
		}
		if names, err := w.driver.Names(t.Context()); err != nil || len(names) > 0 {
			t.Errorf("machines %v %v", names, err)
		}
	})
	if o := w.run(t, id, "cat /f"); o.Stdout != "kept\n" {
		t.Errorf("%+v", o)
	}
}

// killedEnv makes this test binary an agent that dies on its way.
const killedEnv = "DSEC_MICROVM_TEST_KILLED"

// Another process creates a sandbox and is killed at each failpoint; the next one cleans up or
// goes on.
func TestG6AgentKilledAtEveryStep(t *testing.T) {
	if os.Getenv(killedEnv) != "" {
		killedAgent(t)
		return
	}
	w := newWorld(t)
	agent := func(_ *testing.T, at string, id dsec.SandboxID) *exec.Cmd {
		cmd := exec.Command(os.Args[0], "-test.run=TestG6AgentKilledAtEveryStep$")
		cmd.Env = append(os.Environ(), killedEnv+"="+strings.Join([]string{at, w.dir, w.name, string(id), kit.dir, kit.kernel.Path, kit.kernel.SHA256,
			kit.initramfs.Path, kit.initramfs.SHA256, fmt.Sprint(kit.base.MetaSize), fmt.Sprint(kit.base.DataSize)}, "\x1f"))
		return cmd
	}
	w.faults().Kill(t, agent, func() { w.close(t) }, func() { w.open(t) })
}

func killedAgent(t *testing.T) {
	f := strings.Split(os.Getenv(killedEnv), "\x1f")
	w := &world{dir: f[1], name: f[2]}
	kit.Do(func() {}) // what the other process made
	base := kit.base
	base.Digest, base.Meta, base.Data = "sha256:killed", f[4]+"/base/meta", f[4]+"/base/data"
	_, err := fmt.Sscan(f[9]+" "+f[10], &base.MetaSize, &base.DataSize)
	must(t, err)
	dir := f[4]
	kit.kernel, kit.initramfs, kit.base = vmm.File{Path: f[5], SHA256: f[6]}, vmm.File{Path: f[7], SHA256: f[8]}, base
	w.openIn(t, dir)
	failpoint.Arm(f[0], failpoint.Kill())
	req := request(withMain("sleep", "100"))
	req.ID = dsec.SandboxID(f[3])
	_, err = w.r.Create(t.Context(), req)
	t.Errorf("survived: %v", err)
}

// exitOf waits for the end of a sandbox that nobody asked for.
func (w *world) exitOf(t *testing.T, id dsec.SandboxID) runtime.Exit {
	t.Helper()
	return runtimetest.ExitOf(t, w.r, id)
}

// The monitor of a machine is killed: nobody knows why, and nothing stays.
func TestKilledMonitorIsNobodysFault(t *testing.T) {
	w := newWorld(t)
	id := w.create(t)
	w.run(t, id, "echo kept > /f; sync")
	all, err := w.hold.Plains(t.Context(), "vm-"+string(id))
	if err != nil || len(all) != 1 {
		t.Fatal(all, err)
	}
	must(t, syscall.Kill(all[0].PID, syscall.SIGKILL))
	if x := w.exitOf(t, id); x.Cause != dsec.CauseUnknown || x.By != dsec.InducedByUnknown || len(x.Evidence) == 0 {
		t.Errorf("%+v", x)
	}
	// Its disk is as after a loss of power, and can be used.
	_, err = w.r.Start(t.Context(), id)
	must(t, err)
	if o := w.run(t, id, "cat /f"); o.Stdout != "kept\n" {
		t.Errorf("%+v", o)
	}
}

// The agent in a machine is killed, which only a hole of the guest's kernel could do: the
// sandbox has damaged itself.
func TestKilledGuestAgentIsDamage(t *testing.T) {
	w := newWorld(t, mortal)
	id := w.create(t)
	_, err := w.r.Exec(t.Context(), id, process.Spec{Argv: []string{"/bin/sh", "-c", "touch /die; sleep 100"}})
	must(t, err)
	if x := w.exitOf(t, id); x.Cause != dsec.CauseAgentDamage || x.By != dsec.InducedBySelf {
		t.Errorf("%+v", x)
	}
	must(t, w.r.Destroy(t.Context(), id))
	w.nothingLeft(t)
}

// The hold ends, and with it every machine.
func TestKilledHoldEndsMachines(t *testing.T) {
	w := newWorld(t)
	id := w.create(t)
	must(t, syscall.Kill(w.hold.Info().PID, syscall.SIGKILL))
	if x := w.exitOf(t, id); x.Cause != dsec.CauseInfraNodeLost || x.By != dsec.InducedByPlatform {
		t.Errorf("%+v", x)
	}
	_ = w.r.Close()
	w.driver.Close()
	must(t, w.disks.Close())
	must(t, w.mounts.Close())
	must(t, w.groups.Close())
	_ = w.hold.Close() // the other end is gone
	w.open(t)
	if x := w.exitOf(t, id); x.Cause != dsec.CauseInfraNodeLost {
		t.Errorf("after the restart: %+v", x)
	}
	must(t, w.r.Destroy(t.Context(), id))
}

// What machines begin with is not what it was: a typed error, and nothing is left.
func TestBrokenKernelAndLayer(t *testing.T) {
	w := newWorld(t)
	short := t.TempDir() + "/vmlinux"
	must(t, exec.Command("cp", kit.kernel.Path, short).Run())
	must(t, os.Truncate(short, 4<<20))
	w.machinery = func(m *Machinery) { m.Kernel.Path = short }
	w.reopen(t)
	_, err := w.r.Create(t.Context(), request(func(r *runtime.Request) { r.Spec.Limits.Memory = 160 << 20 }))
	if !errors.Is(err, dsec.Corrupt.Err()) {
		t.Errorf("a truncated kernel: %v", err)
	}
	w.nothingLeft(t)
	w.machinery = nil
	w.reopen(t)
	bad := kit.base
	bad.Meta = t.TempDir() + "/meta"
	must(t, os.WriteFile(bad.Meta, make([]byte, bad.MetaSize), 0o644))
	_, err = w.r.Create(t.Context(), request(func(r *runtime.Request) { r.Layers.Layers[0] = bad }))
	if err == nil || dsec.ClassOf(err) == dsec.Timeout {
		t.Errorf("a layer of zeros: %v", err)
	}
	t.Log(err)
	w.nothingLeft(t)
	bad.Meta += ".gone"
	if _, err = w.r.Create(t.Context(), request(func(r *runtime.Request) { r.Layers.Layers[0] = bad })); err == nil {
		t.Error("a layer that is not there")
	}
	w.nothingLeft(t)
}

// A pool without room refuses, and what was begun is gone.
func TestNoRoomForADisk(t *testing.T) {
	if !long {
		t.Skip("it fills a disk of an emulated machine: DSEC_LONG is not set")
	}
	w := newWorld(t, tight)
	_, err := w.r.Create(t.Context(), request(func(r *runtime.Request) { r.Spec.Limits.Disk = 1 << 30 }))
	if err == nil {
		// A sparse disk needs no room before it is written.
		list, err := w.r.List(t.Context())
		must(t, err)
		o := w.run(t, list[0].ID, "for i in 1 2 3 4 5 6 7 8; do dd if=/dev/zero of=/big$i bs=1M count=50 conv=fsync 2>/dev/null || full=1; done; echo full $full; echo alive")
		if o.Stdout != "full 1\nalive\n" {
			t.Errorf("a disk without room: %+v", o)
		}
		must(t, w.r.Destroy(t.Context(), list[0].ID))
	} else if !errors.Is(err, dsec.NoSpace.Err()) {
		t.Error(err)
	}
	w.nothingLeft(t)
}

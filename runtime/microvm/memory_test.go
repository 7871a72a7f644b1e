package microvm

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/process"
	"github.com/opendsec/dsec/runtime"
	"github.com/opendsec/dsec/runtime/microvm/qemu"
	"github.com/opendsec/dsec/runtime/microvm/vmm"
	"github.com/opendsec/dsec/runtime/runtimetest"
)

const mib = 1 << 20

func cold(r *runtime.Request) { r.Spec.Boot = dsec.BootCold }

// roomy is for a sandbox that takes 150 MiB of memory, or of disk.
func roomy(r *runtime.Request) { r.Spec.Limits.Memory, r.Spec.Limits.Disk = 256*mib, 256*mib }

// host is what a sandbox has of this machine's memory.
func (w *world) host(t testing.TB, id dsec.SandboxID) int64 {
	t.Helper()
	s, err := w.r.Stats(t.Context(), id)
	must(t, err)
	return s.HostMemory
}

// hog has a program take 150 MiB of memory, and returns what the host has of it then. The program ends.
func (w *world) hog(t testing.TB, id dsec.SandboxID) int64 {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	// tail keeps what has no end of line.
	p, err := w.r.Exec(ctx, id, runtimetest.Shell("(head -c 157286400 /dev/zero; echo full >&2; sleep 600) | tail >/dev/null"))
	must(t, err)
	eventually(t, "it has its memory", func() bool {
		head, _, _, err := p.Kept(ctx, process.Stderr)
		return err == nil && string(head) == "full\n"
	})
	most := w.host(t, id)
	must(t, p.Kill(ctx))
	_, err = p.Wait(ctx)
	must(t, err)
	must(t, p.Release(ctx))
	return most
}

// falls waits until the host has no more than that of a sandbox.
func (w *world) falls(t testing.TB, what string, id dsec.SandboxID, to int64) {
	t.Helper()
	began := time.Now()
	var have int64
	for have = w.host(t, id); have > to; have = w.host(t, id) {
		if time.Since(began) > 2*time.Minute {
			t.Fatalf("%s: the host still has %d MiB of it, want at most %d", what, have/mib, to/mib)
		}
		time.Sleep(250 * time.Millisecond)
	}
	t.Logf("%s: down to %d MiB after %v", what, have/mib, time.Since(began).Round(100*time.Millisecond))
}

// What a cold machine does not use goes back to the host: what was freed, and files that nobody has
// read for a while. A clone, which has no balloon, is the proof that it does not go by itself.
func TestMemoryGoesBack(t *testing.T) {
	w := newWorld(t)
	id, clone := w.create(t, roomy, cold), w.create(t, roomy)
	t.Log(w.run(t, id, "cat /proc/pressure/memory; uptime").Stdout)
	base := w.host(t, id)
	most, mostClone := w.hog(t, id), w.hog(t, clone)
	t.Logf("at first %d MiB, at most %d; the clone at most %d", base/mib, most/mib, mostClone/mib)
	if most < base+120*mib {
		t.Fatalf("a program of 150 MiB: %d MiB, before that %d", most/mib, base/mib)
	}
	w.falls(t, "after a program", id, most-120*mib)
	if have := w.host(t, clone); have < mostClone-20*mib {
		t.Errorf("the clone had %d MiB and has %d: what is seen is no doing of the balloon", mostClone/mib, have/mib)
	}
	if !long {
		t.Log("what becomes of files is not waited for: DSEC_LONG is not set")
		return
	}
	for _, id := range []dsec.SandboxID{id, clone} {
		if o := w.run(t, id, "head -c 104857600 /dev/zero >/big; sync; cat /big >/dev/null; echo $?"); o.Stdout != "0\n" {
			t.Fatalf("%+v", o)
		}
	}
	most, mostClone = w.host(t, id), w.host(t, clone)
	t.Logf("with a file: %d MiB, the clone %d MiB", most/mib, mostClone/mib)
	w.falls(t, "after a file", id, most-70*mib)
	if have := w.host(t, clone); have < mostClone-20*mib {
		t.Errorf("the clone had %d MiB and has %d", mostClone/mib, have/mib)
	}
	if o := w.run(t, id, "wc -c </big"); o.Stdout != "104857600\n" {
		t.Errorf("%+v", o)
	}
}

// A cold machine goes on giving back when it was suspended, when it is a copy, when another process has
// adopted it and when it was stopped and started; and while it is stopped a clone serves its files.
func TestMemoryGoesBackForGood(t *testing.T) {
	if !long {
		t.Skip("it waits for six machines, emulated, one after the other: DSEC_LONG is not set")
	}
	w := newWorld(t)
	id := w.create(t, roomy, cold)
	goes := func(what string, id dsec.SandboxID) {
		t.Helper()
		w.falls(t, what, id, w.hog(t, id)-120*mib)
	}
	must(t, w.r.Suspend(t.Context(), id))
	must(t, w.r.Resume(t.Context(), id))
	goes("brought back from disk", id)

	must(t, w.r.KeepMoment(t.Context(), id, "m"))
	fork := request(roomy, cold)
	fork.From = "m"
	_, err := w.r.Create(t.Context(), fork)
	must(t, err)
	must(t, w.r.DropMoment(t.Context(), "m"))
	goes("a copy", fork.ID)
	must(t, w.r.Destroy(t.Context(), fork.ID))

	w.reopen(t)
	goes("adopted", id)

	w.run(t, id, "echo kept >/kept; sync")
	must(t, w.r.Stop(t.Context(), id, 0))
	f, err := w.r.Files(t.Context(), id, "")
	must(t, err)
	st, err := f.Stat(t.Context(), "/kept", false)
	if err != nil || st.Size != 5 {
		t.Errorf("a file of a stopped sandbox: %+v, %v", st, err)
	}
	_, err = w.r.Start(t.Context(), id)
	must(t, err)
	goes("started again", id)
}

// hastyVMM calls then when a machine has been started, and nothing was heard of its guest.
type hastyVMM struct {
	*qemu.Driver
	then func()
}

func (h *hastyVMM) Start(ctx context.Context, s vmm.Shape, d vmm.Devices) (vmm.VM, error) {
	m, err := h.Driver.Start(ctx, s, d)
	h.then()
	return m, err
}

// Nothing is left of a cold machine whose caller goes while it boots.
func TestColdBootThatIsBrokenOff(t *testing.T) {
	w := newWorld(t)
	ctx, cancel := context.WithCancel(t.Context())
	w.machinery = func(m *Machinery) { m.VMM = &hastyVMM{w.driver, cancel} }
	w.reopen(t)
	_, err := w.r.Create(ctx, request(cold))
	if !errors.Is(err, dsec.Canceled.Err()) || !strings.Contains(err.Error(), "boot") {
		t.Errorf("%v, want canceled, and that it booted", err)
	}
	w.nothingLeft(t)
	w.machinery = nil
	w.reopen(t)
	if o := w.run(t, w.create(t, cold), "echo here"); o.Stdout != "here\n" {
		t.Errorf("%+v", o)
	}
}

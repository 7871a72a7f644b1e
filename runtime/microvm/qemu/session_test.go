package qemu

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	guestlink "github.com/opendsec/dsec/guest"
	"github.com/opendsec/dsec/runtime/microvm/boot"
	"github.com/opendsec/dsec/runtime/microvm/vmm"
)

// withAgent is the shape of a machine whose PID 1 is dsec-guest.
func (g guest) withAgent(t *testing.T) vmm.Shape {
	t.Helper()
	agent := filepath.Join(t.TempDir(), "agent")
	build := exec.CommandContext(ctxOf(t), "go", "build", "-trimpath", "-ldflags", "-s -w", "-o", agent, "github.com/opendsec/dsec/cmd/dsec-guest")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	program, err := os.ReadFile(agent)
	if err != nil {
		t.Fatal(err)
	}
	init, err := os.ReadFile(filepath.Join(g.dir, "init"))
	if err != nil {
		t.Fatal(err)
	}
	cache, err := filepath.Abs("../../../.cache/vm")
	if err != nil {
		t.Fatal(err)
	}
	built, err := boot.Build(ctxOf(t), boot.Config{Cache: cache, Init: init, Modules: []string{"virtio_pci", "virtio_console"},
		Files: []boot.File{{Name: "agent", Mode: 0o755, Content: program}}})
	if err != nil {
		t.Fatal(err)
	}
	return vmm.Shape{Kernel: fileOf(built.Image), Initramfs: fileOf(built.Initramfs), CPUs: 1, Memory: 128 << 20}
}

// The real guest goes from host to host, each killed while it asked for many things: the same
// agent answers the next.
func TestTheGuestIsTalkedWithByTheNextOwner(t *testing.T) {
	h := newHouse(t)
	shape := h.g.withAgent(t)
	owner := h.child(ownerJob{Do: "session", Name: "real", Shape: shape})
	owner.wait("there")
	var life string
	for i := range 4 {
		time.Sleep(time.Duration(i*i*7) * time.Millisecond) // any moment
		owner.kill()
		d, c := h.next()
		m := h.adopt(d, "real")
		session, err := guestlink.Connect(ctxOf(t), m.Channel(), guestlink.Options{})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := session.List(ctxOf(t)); err != nil {
			t.Error(err)
		}
		if now := session.Hello().Boot; now == "" || life != "" && now != life {
			t.Errorf("the guest is %q, was %q", now, life)
		} else {
			life = now
		}
		if i == 3 {
			m.Kill()
			h.nothing(d)
			return
		}
		// As if this process had died, too.
		m.leave()
		_ = c.Close()
		owner = h.child(ownerJob{Do: "resume", Name: "real"})
		owner.wait("there")
	}
}

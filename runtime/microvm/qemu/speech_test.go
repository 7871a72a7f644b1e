package qemu

import (
	"bufio"
	"fmt"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/opendsec/dsec/runtime/microvm/vmm"
)

// speech is more than the connection to a host that does not listen holds.
const speech = 600 << 10

// unheard has the guest of a machine say more than anybody listens to, and returns when
// QEMU has taken a piece of it that it cannot pass on.
func unheard(t *testing.T, m *machine) {
	t.Helper()
	if _, err := fmt.Fprintln(m.agent, "say", speech>>10); err != nil {
		t.Fatal(err)
	}
	ctx := limited(t, 20*time.Second)
	for taken := 0; taken == 0; time.Sleep(pollTime) {
		var queue struct {
			InUse int `json:"inuse"`
		}
		if err := m.call(ctx, "x-query-virtio-queue-status", map[string]any{"path": "/machine/peripheral/serial/virtio-backend", "queue": 5}, &queue); err != nil {
			t.Fatal(err)
		}
		taken = queue.InUse
	}
}

// A machine that stood still in the middle of a sentence ends it where it goes on, and
// can be talked with. What QEMU reads of its state comes in pieces; between two of them, a
// QEMU 7.2 went on with that sentence before it knew how much of it was said.
func TestAMachineIsWrittenInTheMiddleOfASentence(t *testing.T) {
	g := theGuest(t)
	first := g.clone(t, "x").(*machine)
	unheard(t, first)
	dir := filepath.Join(t.TempDir(), "snapshot")
	if err := first.Snapshot(ctxOf(t), dir); err != nil {
		t.Fatal(err)
	}
	first.Kill()
	busy(t)
	for range 10 {
		m, err := g.driver.Restore(ctxOf(t), dir, g.devices(t, "x"))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(m.Kill)
		if err := m.Resume(ctxOf(t)); err != nil {
			t.Fatal(err)
		}
		endsIt(t, m)
	}
}

// busy leaves this process little of the machine, until the test ends.
func busy(t *testing.T) {
	var burning sync.WaitGroup
	for range 2 * runtime.NumCPU() {
		burning.Go(func() {
			for t.Context().Err() == nil { //nolint:revive // it is to be busy
			}
		})
	}
	t.Cleanup(burning.Wait)
}

// endsIt hears the rest of it, and talks with the guest.
func endsIt(t *testing.T, m vmm.VM) {
	t.Helper()
	ch := m.Channel()
	if err := ch.SetDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	rest, err := bufio.NewReader(ch).ReadString('\n')
	if err != nil || strings.Trim(rest, "s") != "\n" || len(rest) > speech+1 {
		t.Fatalf("%d bytes of a sentence of %d, %v; %v", len(rest), speech, err, m.(*machine).said)
	}
	want(t, m, "ping", "pong")
	m.Kill()
}

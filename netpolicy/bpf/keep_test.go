package bpf

import (
	"net/netip"
	"os"
	"runtime"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/linux"
	"github.com/opendsec/dsec/netpolicy"
)

// TestAKeptGateIsTakenOver by the next process, with what is in force and pinned; one
// of which a part is missing was never used.
func TestAKeptGateIsTakenOver(t *testing.T) {
	k := linux.NewKeeper()
	t.Cleanup(k.Close)
	open := func() *Gate {
		t.Helper()
		g, err := Open(t.Context(), k, "x")
		if err != nil {
			t.Fatal(err)
		}
		return g
	}
	plan, err := netpolicy.Compile(dsec.NetworkAllow, []dsec.NetworkRule{{CIDR: "1.2.3.4", Ports: []string{"443"}}}, netpolicy.Ground{})
	if err != nil {
		t.Fatal(err)
	}
	pinned := netip.MustParseAddr("5.6.7.8")
	g := open()
	index := inLink(t, func(index int) error {
		if err := g.Attach(index); err != nil {
			return err
		}
		if err := g.Add(index, own, plan); err != nil {
			return err
		}
		return g.Pin(index, pinned, plan.Prefixes[0].Open, time.Hour)
	})
	if err := g.Close(); err != nil {
		t.Fatal(err)
	}
	g = open()
	if p := g.Pinned(index); g.Generation(index) == 0 || len(p) != 1 || p[0] != pinned || g.links[uint32(index)].generation != 1 {
		t.Errorf("taken over: %v, %+v", p, g.links[uint32(index)])
	}
	if n, err := g.Apply(index, netpolicy.Plan{}); err != nil || n != 2 {
		t.Errorf("generation %d, %v", n, err)
	}
	if err := g.Close(); err != nil {
		t.Fatal(err)
	}
	if err := k.Drop(t.Context(), keptName("x", "dsec_pins")); err != nil {
		t.Fatal(err)
	}
	g = open()
	names, err := k.Names(t.Context(), layout)
	if err != nil || g.Generation(index) != 0 || len(names) != len(specs()) {
		t.Errorf("half a gate was taken over; kept are %v, %v", names, err)
	}
	if err := g.Close(); err != nil {
		t.Fatal(err)
	}
}

// inLink runs f with a link of a namespace that ends with it.
func inLink(t *testing.T, f func(index int) error) (index int) {
	t.Helper()
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // the thread is of no use afterwards, and ends
		err := os.NewSyscallError("unshare", unix.Unshare(unix.CLONE_NEWNET))
		l := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "a"}, PeerName: "b"}
		if err == nil {
			err = netlink.LinkAdd(l)
		}
		if index = l.Index; err == nil {
			err = f(index)
		}
		done <- err
	}()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	return index
}

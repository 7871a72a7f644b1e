package gvisor

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/linux"
	"github.com/opendsec/dsec/netpolicy"
	"github.com/opendsec/dsec/netpolicy/bpf"
	"github.com/opendsec/dsec/netpolicy/veth"
	"github.com/opendsec/dsec/runtime"
)

// newNetNS makes a network namespace that stands for the machine's.
func newNetNS(t testing.TB) *os.File {
	t.Helper()
	var ns *os.File
	must(t, linux.OnThread(func() (err error) {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return err
		}
		ns, err = os.Open("/proc/thread-self/ns/net")
		return err
	}))
	t.Cleanup(func() { ns.Close() })
	return ns
}

func testGate(t *testing.T) netpolicy.Gate {
	t.Helper()
	m, err := bpf.NewMaps()
	must(t, err)
	t.Cleanup(m.Close)
	g, err := bpf.New(m)
	must(t, err)
	t.Cleanup(func() { must(t, g.Close()) })
	return g
}

// TestAPolicyHoldsForTheSentrysPackets: they never pass the sockets of the machine, and
// are judged where the link ends.
func TestAPolicyHoldsForTheSentrysPackets(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	allow := func(r *runtime.Request) { r.Spec.Network = dsec.NetworkAllow }
	if _, err := w.r.Create(t.Context(), request(t, allow)); !errors.Is(err, dsec.Unsupported.Err()) {
		t.Errorf("without a network: %v", err)
	}
	n, err := veth.Open(t.Context(), veth.Config{Gate: testGate(t), Name: fmt.Sprintf("g%d", os.Getpid()%10_000_000), Node: newNetNS(t), DNS: []netip.Addr{netip.MustParseAddr("9.9.9.9")}})
	must(t, err)
	defer n.Close()
	w.r.cfg.Network = n
	id := w.create(t, allow)
	o := w.sh(t, id, "ip -4 addr show eth0 | sed -n 's/.*inet \\([0-9.]*\\).*/\\1/p'; grep $(hostname) /etc/hosts | cut -f1; ip route | grep -c default")
	if f := strings.Fields(o.Stdout); len(f) < 3 || f[0] != f[1] || f[len(f)-1] != "1" {
		t.Errorf("%q %s", o.Stdout, o.Stderr)
	}
	// What is not open is refused by the router; what is finds no way from this machine.
	try := "echo | nc -w 2 192.0.2.1 80 2>&1 | grep -c refused; true"
	w.want(t, id, try, "1\n")
	rule := dsec.NetworkPolicy{Mode: dsec.NetworkAllow, Allow: []dsec.NetworkRule{{CIDR: "192.0.2.1"}}}
	if g, err := w.r.SetNetwork(t.Context(), id, rule); err != nil || g != 2 {
		t.Fatalf("generation %d, %v", g, err)
	}
	w.want(t, id, try, "0\n")
	must(t, w.r.Stop(t.Context(), id, 0))
	_, err = w.r.Start(t.Context(), id)
	must(t, err)
	w.want(t, id, try, "0\n")
	e, err := w.r.Egress(t.Context(), id)
	if err != nil || e.PacketsOut == 0 {
		t.Errorf("egress %+v %v", e, err)
	}
	none := w.create(t)
	if _, err := w.r.SetNetwork(t.Context(), none, rule); dsec.ClassOf(err) != dsec.IllegalState {
		t.Errorf("of one without a network: %v", err)
	}
	w.want(t, none, "ip link | grep -c '^[0-9]'; ip route | grep -c default; true", "1\n0\n")
}

package container

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

func openNet(r *runtime.Request) { r.Spec.Network = dsec.NetworkOpen }

func TestOpenNetworkHasAnAddressAndItsFiles(t *testing.T) {
	w := newWorld(t)
	if _, err := w.r.Create(t.Context(), request(t, openNet)); !errors.Is(err, dsec.Unsupported.Err()) {
		t.Errorf("without a network: %v", err)
	}
	n, err := veth.Open(t.Context(), veth.Config{Gate: testGate(t), Name: fmt.Sprintf("t%d", os.Getpid()%10_000_000), Node: newNetNS(t), DNS: []netip.Addr{netip.MustParseAddr("9.9.9.9")}})
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	w.r.cfg.Network = n
	id := w.create(t, openNet)
	script := "ip -4 addr show eth0 | sed -n 's/.*inet \\([0-9.]*\\).*/\\1/p'; grep $(hostname) /etc/hosts | cut -f1; grep nameserver /etc/resolv.conf; ip route | grep -c default"
	o := w.sh(t, id, script)
	f := strings.Fields(o.Stdout)
	if len(f) != 7 || f[0] != f[1] || f[3] != "9.9.9.9" || f[5] != n.Gateway().String() || f[6] != "1" {
		t.Errorf("%q %s", o.Stdout, o.Stderr)
	}
	must(t, w.r.Stop(t.Context(), id, 0))
	_, err = w.r.Start(t.Context(), id)
	must(t, err)
	if g := strings.Fields(w.sh(t, id, script).Stdout); len(g) != 7 || g[0] != g[1] {
		t.Errorf("after a restart: %q", g)
	}
	must(t, w.r.Destroy(t.Context(), id))
	eventually(t, "its link is gone", func() bool {
		live, err := n.Live(t.Context())
		return err == nil && len(live) == 0
	})
}

// TestANetworkIsSetOnARunningSandbox: and stays so when it is started again.
func TestANetworkIsSetOnARunningSandbox(t *testing.T) {
	w := newWorld(t)
	n, err := veth.Open(t.Context(), veth.Config{Gate: testGate(t), Name: fmt.Sprintf("s%d", os.Getpid()%10_000_000), Node: newNetNS(t), DNS: []netip.Addr{}})
	must(t, err)
	defer n.Close()
	w.r.cfg.Network = n
	id := w.create(t, func(r *runtime.Request) { r.Spec.Network = dsec.NetworkAllow })
	// What is not open is refused by the router; what is finds no way from this machine.
	try := "echo | nc -w 2 192.0.2.1 80 2>&1 | grep -c refused; true"
	w.want(t, id, try, "1\n")
	rule := dsec.NetworkPolicy{Mode: dsec.NetworkAllow, Allow: []dsec.NetworkRule{{CIDR: "192.0.2.1"}}}
	if g, err := w.r.SetNetwork(t.Context(), id, rule); err != nil || g != 2 {
		t.Fatalf("generation %d, %v", g, err)
	}
	w.want(t, id, try, "0\n")
	must(t, w.r.Stop(t.Context(), id, 0))
	if _, err := w.r.SetNetwork(t.Context(), id, rule); dsec.ClassOf(err) != dsec.IllegalState {
		t.Errorf("of one that is stopped: %v", err)
	}
	_, err = w.r.Start(t.Context(), id)
	must(t, err)
	w.want(t, id, try, "0\n")
	none := w.create(t)
	if _, err := w.r.SetNetwork(t.Context(), none, rule); dsec.ClassOf(err) != dsec.IllegalState {
		t.Errorf("of one without a network: %v", err)
	}
}

// TestPackageManagersAreLedToTheMirror: over what the image says, under what the
// caller does, and as long as the policy opens it.
func TestPackageManagersAreLedToTheMirror(t *testing.T) {
	w := newWorld(t)
	n, err := veth.Open(t.Context(), veth.Config{Gate: testGate(t), Name: fmt.Sprintf("m%d", os.Getpid()%10_000_000), Node: newNetNS(t), DNS: []netip.Addr{}, Mirror: true})
	must(t, err)
	defer n.Close()
	w.r.cfg.Network = n
	id := w.create(t, func(r *runtime.Request) {
		r.Spec.Network, r.Spec.Env = dsec.NetworkMirror, map[string]string{"GOPROXY": "off"}
		r.Layers.Config.Env = append(r.Layers.Config.Env, "PIP_INDEX_URL=http://image.example")
	})
	show := "echo $PIP_INDEX_URL $npm_config_registry $GOPROXY; cat /etc/resolv.conf | grep -c nameserver"
	w.want(t, id, show, "http://pypi.mirror.dsec/simple/ http://npm.mirror.dsec/ off\n1\n")
	_, err = w.r.SetNetwork(t.Context(), id, dsec.NetworkPolicy{Mode: dsec.NetworkAllow})
	must(t, err)
	w.want(t, id, show, "http://image.example off\n1\n")
}

func TestNetworkNoneHasOnlyLoopback(t *testing.T) {
	w := newWorld(t)
	w.want(t, w.create(t), "ip link | grep -c '^[0-9]'; ip route | wc -l; test -e /etc/resolv.conf || echo none", "1\n0\nnone\n")
}

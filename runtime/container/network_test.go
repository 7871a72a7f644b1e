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
	"github.com/opendsec/dsec/netpolicy/veth"
	"github.com/opendsec/dsec/runtime"
)

// newNetNS makes a network namespace that stands for the machine's.
func newNetNS(t *testing.T) *os.File {
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

func openNet(r *runtime.Request) { r.Spec.Network = dsec.NetworkOpen }

func TestOpenNetworkHasAnAddressAndItsFiles(t *testing.T) {
	w := newWorld(t)
	if _, err := w.r.Create(t.Context(), request(t, openNet)); !errors.Is(err, dsec.Unsupported.Err()) {
		t.Errorf("without a network: %v", err)
	}
	n, err := veth.Open(t.Context(), veth.Config{Name: fmt.Sprintf("t%d", os.Getpid()%10_000_000), Node: newNetNS(t), DNS: []netip.Addr{netip.MustParseAddr("9.9.9.9")}})
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	w.r.cfg.Network = n
	id := w.create(t, openNet)
	script := "ip -4 addr show eth0 | sed -n 's/.*inet \\([0-9.]*\\).*/\\1/p'; grep $(hostname) /etc/hosts | cut -f1; grep nameserver /etc/resolv.conf; ip route | grep -c default"
	o := w.sh(t, id, script)
	f := strings.Fields(o.stdout)
	if len(f) != 5 || f[0] != f[1] || f[3] != "9.9.9.9" || f[4] != "1" {
		t.Errorf("%q %s", o.stdout, o.stderr)
	}
	must(t, w.r.Stop(t.Context(), id, 0))
	_, err = w.r.Start(t.Context(), id)
	must(t, err)
	if g := strings.Fields(w.sh(t, id, script).stdout); len(g) != 5 || g[0] != g[1] {
		t.Errorf("after a restart: %q", g)
	}
	must(t, w.r.Destroy(t.Context(), id))
	eventually(t, "its link is gone", func() bool {
		live, err := n.Live(t.Context())
		return err == nil && len(live) == 0
	})
}

func TestNetworkNoneHasOnlyLoopback(t *testing.T) {
	w := newWorld(t)
	w.want(t, w.create(t), "ip link | grep -c '^[0-9]'; ip route | wc -l; test -e /etc/resolv.conf || echo none", "1\n0\nnone\n")
}

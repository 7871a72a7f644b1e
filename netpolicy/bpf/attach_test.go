package bpf

import (
	"os"
	"runtime"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// TestBothWaysToAttach: each puts its programs in both directions of a link, once,
// however often it is done.
func TestBothWaysToAttach(t *testing.T) {
	g, next := gate(t), gate(t)
	ways := map[string]func(index int, g *Gate) error{
		"clsact": func(i int, g *Gate) error { return classic(i, g.from, g.to) },
		"tcx":    func(i int, g *Gate) error { return both(i, g.from, g.to) },
	}
	done := make(chan struct{})
	go func() { // the thread is of no use afterwards, and ends
		defer close(done)
		runtime.LockOSThread()
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			t.Error(os.NewSyscallError("unshare", err))
			return
		}
		for name, attach := range ways {
			l := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name}, PeerName: name + "peer"}
			if err := netlink.LinkAdd(l); err != nil {
				t.Error(err)
				return
			}
			for _, g := range []*Gate{g, g, next} { // again, and by the next version
				if err := attach(l.Index, g); err != nil {
					if name == "tcx" && haveNoTCX(l.Index) {
						t.Logf("this kernel has no tcx (Linux 6.6): %v", err)
						return
					}
					t.Errorf("%s: %v", name, err)
				}
			}
			for _, parent := range []uint32{netlink.HANDLE_MIN_INGRESS, netlink.HANDLE_MIN_EGRESS} {
				filters, err := netlink.FilterList(l, parent)
				if err != nil || name == "clsact" && len(filters) != 1 || name == "tcx" && len(filters) != 0 {
					t.Errorf("%s: filters %v, %v", name, filters, err)
				}
			}
			for _, at := range []ebpf.AttachType{ebpf.AttachTCXIngress, ebpf.AttachTCXEgress} {
				q, err := link.QueryPrograms(link.QueryOptions{Target: l.Index, Attach: at})
				if name == "tcx" && (err != nil || len(q.Programs) != 1) {
					t.Errorf("%s: programs %+v, %v", name, q, err)
				}
			}
		}
	}()
	<-done
}

func haveNoTCX(index int) bool {
	_, err := link.QueryPrograms(link.QueryOptions{Target: index, Attach: ebpf.AttachTCXIngress})
	return err != nil
}

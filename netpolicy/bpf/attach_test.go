package bpf

import (
	"fmt"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
)

// TestBothWaysToAttach: each puts its programs in both directions of a link, once,
// however often it is done, and by the next version.
func TestBothWaysToAttach(t *testing.T) {
	g, next := gate(t), gate(t)
	t.Run("clsact", func(t *testing.T) {
		inLink(t, func(index int) error {
			for _, g := range []*Gate{g, g, next} {
				if err := classic(index, g.from, g.to); err != nil {
					return err
				}
			}
			for _, parent := range []uint32{netlink.HANDLE_MIN_INGRESS, netlink.HANDLE_MIN_EGRESS} {
				filters, err := netlink.FilterList(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Index: index}}, parent)
				if err != nil || len(filters) != 1 {
					return fmt.Errorf("filters %v, %w", filters, err)
				}
			}
			return nil
		})
	})
	t.Run("tcx", func(t *testing.T) {
		inLink(t, func(index int) error {
			if _, err := link.QueryPrograms(link.QueryOptions{Target: index, Attach: ebpf.AttachTCXIngress}); err != nil {
				t.Logf("this kernel has no tcx (Linux 6.6), clsact is what it has: %v", err)
				return nil
			}
			for _, g := range []*Gate{g, g, next} {
				if err := both(index, g.from, g.to); err != nil {
					return err
				}
			}
			for _, at := range []ebpf.AttachType{ebpf.AttachTCXIngress, ebpf.AttachTCXEgress} {
				q, err := link.QueryPrograms(link.QueryOptions{Target: index, Attach: at})
				if err != nil || len(q.Programs) != 1 {
					return fmt.Errorf("programs %+v, %w", q, err)
				}
			}
			return nil
		})
	})
}

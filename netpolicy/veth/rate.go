package veth

import (
	"errors"
	"fmt"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
)

const (
	leastBurst = 128 << 10             // bytes: one packet as the kernel hands it on has up to 64 KiB
	burstTime  = 20 * time.Millisecond // of the rate, which may pass at once
	queueTime  = 50 * time.Millisecond // what is behind that is dropped
)

// shape bounds what leaves by a link to so many bytes a second; 0: not at all. What
// is beyond waits a little, then is dropped, which senders of streams adapt to.
func shape(s *space, l netlink.Link, rate int64) error {
	if rate == 0 {
		return nil
	}
	burst := max(leastBurst, rate*int64(burstTime)/int64(time.Second))
	q := &netlink.Tbf{
		QdiscAttrs: netlink.QdiscAttrs{LinkIndex: l.Attrs().Index, Parent: netlink.HANDLE_ROOT, Handle: netlink.MakeHandle(1, 0)},
		Rate:       uint64(rate),
		Buffer:     netlink.Xmittime(uint64(rate), uint32(burst)),
		Limit:      uint32(burst + rate*int64(queueTime)/int64(time.Second)),
	}
	err := s.QdiscAdd(q)
	if errors.Is(err, unix.ENOENT) {
		return dsec.Errorf(dsec.Unsupported, "limit bandwidth", l.Attrs().Name, "the kernel has no token buckets (sch_tbf)")
	}
	if err != nil {
		return fmt.Errorf("limit %s to %d bytes a second: %w", l.Attrs().Name, rate, err)
	}
	return nil
}

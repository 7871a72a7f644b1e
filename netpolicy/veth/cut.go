package veth

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/netpolicy"
)

// cut ends the connections of a namespace that are not open any more. Their packets
// pass no more, but who only waits for some would wait for long. One that a rule of
// addresses opened before, and now a name alone, was never looked at.
func cut(ns *os.File, e *end, before netpolicy.Plan) error {
	return inNamespace(ns, func() error {
		h, err := netlink.NewHandle(unix.NETLINK_INET_DIAG)
		if err != nil {
			return fmt.Errorf("list connections: %w", err)
		}
		defer h.Close()
		all, err := h.SocketDiagTCP(unix.AF_INET)
		if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
			return fmt.Errorf("list connections: %w", err)
		}
		mapped, err := h.SocketDiagTCP(unix.AF_INET6)
		if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
			return fmt.Errorf("list connections: %w", err)
		}
		for _, s := range append(all, mapped...) {
			if err := cutOne(h, s, e, before); err != nil {
				return err
			}
		}
		return nil
	})
}

func cutOne(h *netlink.Handle, s *netlink.Socket, e *end, before netpolicy.Plan) error {
	to, ok := netip.AddrFromSlice(s.ID.Destination)
	if !ok || to.IsUnspecified() || to.Unmap().IsLoopback() {
		return nil
	}
	if port := s.ID.DestinationPort; e.opens(to, unix.IPPROTO_TCP, port) && !e.unseen(to, port, before) {
		return nil
	}
	local := &net.TCPAddr{IP: s.ID.Source, Port: int(s.ID.SourcePort)}
	remote := &net.TCPAddr{IP: s.ID.Destination, Port: int(s.ID.DestinationPort)}
	if err := h.SocketDestroy(local, remote); err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("end connection to %s: %w", remote, err)
	}
	return nil
}

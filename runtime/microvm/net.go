package microvm

import (
	"context"
	cryptorand "crypto/rand"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/guest"
	"github.com/opendsec/dsec/internal/linux"
	"github.com/opendsec/dsec/netpolicy"
	"github.com/opendsec/dsec/runtime/tier"
)

// lease is what a sandbox has of its network while it runs.
type lease struct {
	netpolicy.Lease
	MAC string `json:"mac"`
	MTU int    `json:"mtu"`
}

// Links of a sandbox's network namespace: the one that leads out, the machine's, and what
// has them carry each other's frames.
const (
	outLink    = "eth0"
	tapLink    = "tap0"
	bridgeLink = "br0"
	guestLink  = "eth0" // what the guest calls its own
)

func netName(id dsec.SandboxID) string { return "vm-net/" + string(id) }

// connectNet makes the network namespace of a sandbox, connects it, and returns the tap. The hold
// keeps the namespace: it ends when the hold lets it go.
func (r *Runtime) connectNet(ctx context.Context, sb *sandbox, rec *record) (tap *os.File, l *lease, err error) {
	const op = "connect network of"
	ns, err := newNetNS()
	if err != nil {
		return nil, nil, dsec.E(dsec.Internal, op, string(sb.ID), err)
	}
	defer func() { _ = ns.Close() }()
	if err := r.hold.Put(ctx, netName(sb.ID), ns); err != nil {
		return nil, nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, r.hold.Drop(context.WithoutCancel(ctx), netName(sb.ID)))
		}
	}()
	at := netpolicy.Place{NetNS: ns, Rate: rec.Request.Spec.Limits.Bandwidth, Link: true}
	l = &lease{}
	if l.Lease, err = r.cfg.Network.Attach(ctx, sb.ID, rec.policy(), at); err != nil {
		return nil, nil, err
	}
	if tap, err = bridge(ns, l); err != nil {
		return nil, nil, dsec.E(dsec.Internal, op, string(sb.ID), err)
	}
	return tap, l, nil
}

// newNetNS makes one in which nothing is.
func newNetNS() (ns *os.File, err error) {
	err = linux.OnThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return os.NewSyscallError("unshare", err)
		}
		ns, err = os.Open("/proc/thread-self/ns/net")
		return err
	})
	return ns, err
}

// bridge has a tap take the place of the namespace's own link: the guest has the address that
// the link was given, and its hardware address, which the network knows it by.
func bridge(ns *os.File, l *lease) (tap *os.File, err error) {
	err = linux.OnThread(func() error {
		if err := linux.JoinNS(ns, unix.CLONE_NEWNET); err != nil {
			return err
		}
		h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
		if err != nil {
			return err
		}
		defer h.Close()
		if tap, err = openTap(); err != nil {
			return err
		}
		return joinLinks(h, l)
	})
	if err != nil && tap != nil {
		_ = tap.Close()
		tap = nil
	}
	runtime.KeepAlive(ns)
	return tap, err
}

func openTap() (*os.File, error) {
	f, err := os.OpenFile("/dev/net/tun", os.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	req, err := unix.NewIfreq(tapLink)
	if err == nil {
		req.SetUint16(unix.IFF_TAP | unix.IFF_NO_PI)
		err = os.NewSyscallError("TUNSETIFF", unix.IoctlIfreq(int(f.Fd()), unix.TUNSETIFF, req))
	}
	if err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

func joinLinks(h *netlink.Handle, l *lease) error {
	out, err := h.LinkByName(outLink)
	if err != nil {
		return fmt.Errorf("find %s: %w", outLink, err)
	}
	l.MAC, l.MTU = out.Attrs().HardwareAddr.String(), out.Attrs().MTU
	addrs, err := h.AddrList(out, netlink.FAMILY_V4)
	if err != nil {
		return fmt.Errorf("list addresses: %w", err)
	}
	for _, a := range addrs {
		if err := h.AddrDel(out, &a); err != nil {
			return fmt.Errorf("remove address: %w", err)
		}
	}
	if err := h.LinkSetHardwareAddr(out, randomMAC()); err != nil {
		return fmt.Errorf("change address of %s: %w", outLink, err)
	}
	no := false
	br := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: bridgeLink, MTU: l.MTU}, MulticastSnooping: &no}
	if err := h.LinkAdd(br); err != nil {
		return fmt.Errorf("make %s: %w", bridgeLink, err)
	}
	for _, name := range []string{outLink, tapLink} {
		port, err := h.LinkByName(name)
		if err == nil {
			err = h.LinkSetMaster(port, br)
		}
		if err == nil {
			err = h.LinkSetMTU(port, l.MTU)
		}
		if err == nil {
			err = h.LinkSetUp(port)
		}
		if err != nil {
			return fmt.Errorf("bridge %s: %w", name, err)
		}
	}
	return h.LinkSetUp(br)
}

// randomMAC is one of this machine's own, of nobody.
func randomMAC() net.HardwareAddr {
	mac := make(net.HardwareAddr, 6)
	_, _ = cryptorand.Read(mac) // never errs
	mac[0] = mac[0]&^1 | 2
	return mac
}

// network is what the guest is told.
func (l *lease) network() *guest.Network {
	if l == nil {
		return nil
	}
	return &guest.Network{Link: guestLink, Address: netip.PrefixFrom(l.Address, 32).String(), Gateway: l.Gateway.String(), MTU: l.MTU, MAC: l.MAC}
}

// policy is what is in force, or comes into force at the next start.
func (r *record) policy() dsec.NetworkPolicy {
	if r.Network != nil {
		return *r.Network
	}
	return r.Request.Spec.PolicyIn(0)
}

// SetNetwork implements runtime.Networker.
func (r *Runtime) SetNetwork(ctx context.Context, id dsec.SandboxID, p dsec.NetworkPolicy) (generation uint64, err error) {
	const op = "set network of sandbox"
	sb, err := r.boxes.Acquire(ctx, op, id)
	if err != nil {
		return 0, err
	}
	defer sb.Leave()
	if _, err := r.boxes.Live(op, id); err != nil {
		return 0, err
	}
	if r.cfg.Network == nil {
		return 0, dsec.Errorf(dsec.Unsupported, op, string(id), "this node has no network for sandboxes")
	}
	if rec := sb.record(); rec != nil && !rec.Request.Spec.HasLink() {
		return 0, dsec.Errorf(dsec.IllegalState, op, string(id), "it was made without a network")
	}
	if sb.isSuspended() { // it comes into force when it goes on
		return 0, tier.Wrap(op, id, r.rewrite(sb, func(rec *record) { rec.Network = &p }))
	}
	ns, err := r.hold.Get(ctx, netName(id))
	if errors.Is(err, dsec.NotFound.Err()) {
		return 0, dsec.Errorf(dsec.IllegalState, op, string(id), "it was made without a network")
	}
	if err != nil {
		return 0, err
	}
	defer func() { _ = ns.Close() }()
	if generation, err = r.cfg.Network.Change(ctx, id, p, ns); err != nil {
		return 0, err
	}
	return generation, tier.Wrap(op, id, r.rewrite(sb, func(rec *record) { rec.Network = &p }))
}

// Egress implements runtime.Networker.
func (r *Runtime) Egress(ctx context.Context, id dsec.SandboxID) (dsec.Egress, error) {
	sb, err := r.boxes.Live("read egress of sandbox", id)
	if err != nil {
		return dsec.Egress{}, err
	}
	if rec := sb.record(); r.cfg.Network == nil || rec == nil || !rec.Request.Spec.HasLink() || sb.isSuspended() {
		return dsec.Egress{Rows: []dsec.EgressRow{}}, nil
	}
	return r.cfg.Network.Egress(ctx, id)
}

package agent

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"regexp"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/guest"
	"github.com/opendsec/dsec/internal/linux"
)

const seedSize = 32

// Requests of random(4).
const (
	rndAddEntropy = 0x40085203
	rndReseedCRNG = 0x5207
)

var (
	machineID = regexp.MustCompile(`^[0-9a-f]{32}$`)
	hostName  = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9.-]{0,62}[A-Za-z0-9])?$`)
)

func wrap(op string, err error) error {
	if e, ok := errors.AsType[*dsec.Error](err); ok {
		return e
	}
	return dsec.E(classOf(err), op, "", err)
}

// resume makes of a machine that starts, or is a copy of another one, one of its
// own; only then the sandbox goes on.
func (a *Agent) resume(q guest.Request) error {
	const op = "resume guest"
	r := q.Resume
	switch {
	case r == nil || len(r.Seed) != seedSize:
		return dsec.Errorf(dsec.Invalid, op, "", "it needs a seed of %d bytes", seedSize)
	case r.MachineID != "" && !machineID.MatchString(r.MachineID):
		return dsec.Errorf(dsec.Invalid, op, "", "machine id %s is not 32 hexadecimal digits", dsec.Quote(r.MachineID))
	case r.Hostname != "" && !hostName.MatchString(r.Hostname):
		return dsec.Errorf(dsec.Invalid, op, "", "host name %s", dsec.Quote(r.Hostname))
	}
	a.starting.Lock()
	defer a.starting.Unlock()
	if err := setClock(r.Time); err != nil {
		return wrap(op, fmt.Errorf("set the clock: %w", err))
	}
	a.lookForHost(machineFiles)
	if err := stir(r.Seed); err != nil {
		return wrap(op, fmt.Errorf("add entropy: %w", err))
	}
	if r.Network != nil {
		if err := setNetwork(*r.Network); err != nil {
			return wrap(op, fmt.Errorf("set up network: %w", err))
		}
	}
	if err := a.rename(*r); err != nil {
		return wrap(op, err)
	}
	a.mu.Lock()
	sb, frozen := a.sandbox, a.frozen
	a.resumed, a.told = true, *r
	a.told.Seed = nil
	a.mu.Unlock()
	if !frozen || sb == nil || r.Frozen {
		return nil
	}
	if err := sb.group.freeze(context.Background(), false); err != nil && !sb.hasEnded() {
		return wrap(op, err)
	}
	a.holdClocks(false)
	a.mu.Lock()
	a.frozen = false
	a.mu.Unlock()
	return nil
}

func setClock(ns int64) error {
	if ns == 0 {
		return nil
	}
	ts := unix.NsecToTimespec(ns)
	return os.NewSyscallError("clock_settime", unix.ClockSettime(unix.CLOCK_REALTIME, &ts))
}

// stir adds a seed to the kernel's pool, as good as it is long, and has the
// generator take it up at once: until then a copy gives the same numbers as
// every other copy.
func stir(seed []byte) error {
	f, err := os.OpenFile("/dev/urandom", os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	b := binary.NativeEndian.AppendUint32(nil, uint32(8*len(seed)))
	b = binary.NativeEndian.AppendUint32(b, uint32(len(seed)))
	b = append(b, seed...)
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), rndAddEntropy, uintptr(unsafe.Pointer(&b[0])))
	if errno == 0 {
		_, _, errno = unix.Syscall(unix.SYS_IOCTL, f.Fd(), rndReseedCRNG, 0)
	}
	if errno != 0 {
		return errno
	}
	return nil
}

// rename gives the machine and the sandbox their names.
func (a *Agent) rename(r guest.Resume) error {
	a.mu.Lock()
	sb := a.sandbox
	a.mu.Unlock()
	if r.Hostname != "" {
		if err := unix.Sethostname([]byte(r.Hostname)); err != nil {
			return fmt.Errorf("set host name: %w", err)
		}
	}
	if sb == nil || sb.hasEnded() {
		return nil
	}
	if r.Hostname != "" {
		var failed error
		err := sb.threads.on(kindOfForker{inside: true}, func() { failed = unix.Sethostname([]byte(r.Hostname)) })
		if err = errors.Join(err, failed); err != nil {
			return fmt.Errorf("set host name: %w", err)
		}
	}
	if err := replaceFiles(sb.root, r.Files); err != nil { // what it has made of its root is its own business
		a.log.Warn("a sandbox has other names than its files say", "err", err)
	}
	return writeMachineID(sb.root, r.MachineID)
}

// writeMachineID overwrites the /etc/machine-id of an image that has one. What the
// sandbox has made of it, a link for one, is its own business.
func writeMachineID(root *os.File, id string) error {
	if id == "" {
		return nil
	}
	f, err := linux.OpenOnMount(root, "/etc/machine-id", unix.O_WRONLY|unix.O_NOFOLLOW)
	if err != nil {
		return nil //nolint:nilerr // it has none
	}
	defer func() { _ = f.Close() }()
	if st, err := f.Stat(); err != nil || !st.Mode().IsRegular() {
		return nil //nolint:nilerr // nor has one with something else there
	}
	if err := f.Truncate(0); err != nil {
		return fmt.Errorf("write machine id: %w", err)
	}
	if _, err := f.WriteAt([]byte(id+"\n"), 0); err != nil {
		return fmt.Errorf("write machine id: %w", err)
	}
	return nil
}

// interfaceRequest is struct ifreq with what is set.
type interfaceRequest struct {
	name [unix.IFNAMSIZ]byte
	data [24]byte
}

// linkUp brings a link up with a fixed IPv4 address, or lo with what it has.
func linkUp(name string, address netip.Prefix, mtu int) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return os.NewSyscallError("socket", err)
	}
	defer func() { _ = unix.Close(fd) }()
	ask := func(what string, request uintptr, fill func(data []byte)) error {
		var r interfaceRequest
		copy(r.name[:unix.IFNAMSIZ-1], name)
		fill(r.data[:])
		if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), request, uintptr(unsafe.Pointer(&r))); errno != 0 {
			return fmt.Errorf("%s of %s: %w", what, name, errno)
		}
		return nil
	}
	if mtu > 0 {
		if err := ask("MTU", unix.SIOCSIFMTU, func(b []byte) { binary.NativeEndian.PutUint32(b, uint32(mtu)) }); err != nil {
			return err
		}
	}
	if address.IsValid() {
		if err := ask("address", unix.SIOCSIFADDR, func(b []byte) { putIPv4(b, address.Addr()) }); err != nil {
			return err
		}
		mask := ^uint32(0) << (32 - address.Bits())
		var m [4]byte
		binary.BigEndian.PutUint32(m[:], mask)
		if err := ask("netmask", unix.SIOCSIFNETMASK, func(b []byte) { putIPv4(b, netip.AddrFrom4(m)) }); err != nil {
			return err
		}
	}
	return ask("state", unix.SIOCSIFFLAGS, func(b []byte) { binary.NativeEndian.PutUint16(b, unix.IFF_UP|unix.IFF_RUNNING) })
}

// putIPv4 writes a struct sockaddr_in.
func putIPv4(b []byte, a netip.Addr) {
	binary.NativeEndian.PutUint16(b, unix.AF_INET)
	ip := a.As4()
	copy(b[4:], ip[:])
}

// route is struct rtentry of a 64-bit kernel.
type route struct {
	_           uint64
	destination [16]byte
	gateway     [16]byte
	mask        [16]byte
	flags       uint16
	_           int16
	_           [2]uint64
	metric      int16
	device      *byte
	_           [3]uint64
}

func setNetwork(n guest.Network) error {
	address, err := netip.ParsePrefix(n.Address)
	if err != nil || !address.Addr().Is4() || address.Bits() < 1 || n.Link == "" || len(n.Link) >= unix.IFNAMSIZ || n.MTU < 0 || n.MTU > 65535 {
		return dsec.Errorf(dsec.Invalid, "set up network", dsec.Quote(n.Link), "address %s, MTU %d", dsec.Quote(n.Address), n.MTU)
	}
	if err := setMAC(n.Link, n.MAC); err != nil {
		return err
	}
	if err := linkUp(n.Link, address, n.MTU); err != nil {
		return err
	}
	if n.Gateway == "" {
		return nil
	}
	gateway, err := netip.ParseAddr(n.Gateway)
	if err != nil || !gateway.Is4() {
		return dsec.Errorf(dsec.Invalid, "set up network", dsec.Quote(n.Link), "gateway %s", dsec.Quote(n.Gateway))
	}
	if !address.Contains(gateway) { // it is a neighbour all the same
		if err := addRoute(route{flags: unix.RTF_UP | unix.RTF_HOST}, gateway, netip.IPv4Unspecified(), n.Link); err != nil {
			return err
		}
	}
	return addRoute(route{flags: unix.RTF_UP | unix.RTF_GATEWAY}, netip.IPv4Unspecified(), gateway, n.Link)
}

// addRoute adds a route to one address, or to all, by a link.
func addRoute(r route, to, via netip.Addr, link string) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return os.NewSyscallError("socket", err)
	}
	defer func() { _ = unix.Close(fd) }()
	name, err := unix.BytePtrFromString(link)
	if err != nil {
		return err
	}
	putIPv4(r.destination[:], to)
	putIPv4(r.gateway[:], via)
	mask := netip.IPv4Unspecified()
	if r.flags&unix.RTF_HOST != 0 {
		mask = netip.AddrFrom4([4]byte{255, 255, 255, 255})
	}
	putIPv4(r.mask[:], mask)
	r.device = name
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCADDRT, uintptr(unsafe.Pointer(&r))); errno != 0 && errno != unix.EEXIST {
		return fmt.Errorf("add route: %w", errno)
	}
	return nil
}

// setMAC gives a link, which is down or goes down for it, an address.
func setMAC(link, mac string) error {
	if mac == "" {
		return nil
	}
	a, err := net.ParseMAC(mac)
	if err != nil || len(a) != 6 || a[0]&1 != 0 {
		return dsec.Errorf(dsec.Invalid, "set up network", dsec.Quote(link), "MAC %s", dsec.Quote(mac))
	}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return os.NewSyscallError("socket", err)
	}
	defer func() { _ = unix.Close(fd) }()
	var r interfaceRequest
	copy(r.name[:unix.IFNAMSIZ-1], link)
	binary.NativeEndian.PutUint16(r.data[:], unix.ARPHRD_ETHER)
	copy(r.data[2:], a)
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCSIFHWADDR, uintptr(unsafe.Pointer(&r))); errno != 0 {
		return fmt.Errorf("MAC of %s: %w", link, errno)
	}
	return nil
}

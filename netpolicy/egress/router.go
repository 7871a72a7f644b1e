package egress

import (
	"context"
	"encoding/binary"
	"log/slog"
	"net"
	"net/netip"
	"os"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
)

// reserved are descriptors for what is no connection.
const reserved = 256

func (c *Config) defaults() {
	if c.Log == nil {
		c.Log = slog.Default()
	}
	if c.Places == 0 {
		c.Places = 1024
		var l unix.Rlimit
		if unix.Getrlimit(unix.RLIMIT_NOFILE, &l) == nil && l.Cur > 2*reserved {
			c.Places = int(min(l.Cur, 1<<20)-reserved) / 2
		}
	}
	if c.Listen == nil {
		c.Listen = func(at netip.AddrPort) (net.Listener, error) { return net.Listen("tcp4", at.String()) }
	}
	if c.Dial == nil {
		var d net.Dialer
		c.Dial = func(ctx context.Context, to netip.AddrPort) (net.Conn, error) {
			return d.DialContext(ctx, "tcp4", to.String())
		}
	}
	if c.Original == nil {
		c.Original = original
	}
	if c.Inside == nil {
		c.Inside = inside
	}
}

// original is whom the client had dialled before the router gave it to us.
func original(c *net.TCPConn) (to netip.AddrPort, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return to, err
	}
	var got *unix.IPv6Mreq // as large as a sockaddr_in, and some
	if cerr := raw.Control(func(fd uintptr) {
		got, err = unix.GetsockoptIPv6Mreq(int(fd), unix.SOL_IP, unix.SO_ORIGINAL_DST)
	}); cerr != nil {
		return to, cerr
	}
	if err != nil {
		return to, err
	}
	b := got.Multiaddr
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte(b[4:8])), binary.BigEndian.Uint16(b[2:])), nil
}

// inside says whether this process is in a network namespace.
func inside(router *os.File) error {
	const op = "look at network namespace"
	var own, theirs unix.Stat_t
	if err := unix.Stat("/proc/self/ns/net", &own); err != nil {
		return dsec.E(dsec.Internal, op, "", err)
	}
	if err := unix.Fstat(int(router.Fd()), &theirs); err != nil {
		return dsec.E(dsec.Internal, op, "", err)
	}
	if own.Ino != theirs.Ino || own.Dev != theirs.Dev {
		return dsec.Errorf(dsec.Conflict, op, "", "it is another one than that of this process")
	}
	return nil
}

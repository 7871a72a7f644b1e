package container

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/linux"
)

// aLongTimeAgo as a deadline ends what waits.
var aLongTimeAgo = time.Unix(1, 0)

// Dial connects to a port of the sandbox's loopback, IPv4 first.
func (r *Runtime) Dial(ctx context.Context, id dsec.SandboxID, port uint16) (net.Conn, error) {
	const op = "connect to sandbox"
	sb, err := r.boxes.Live(op, id)
	if err != nil {
		return nil, err
	}
	ns, err := r.hold.Namespaces(ctx, string(id))
	if err != nil {
		return nil, r.explain(op, sb, err)
	}
	defer ns.Close()
	var errs []error
	for _, a := range []netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 1}), netip.IPv6Loopback()} {
		c, err := dialIn(ctx, ns.NetNS, netip.AddrPortFrom(a, port))
		if err == nil {
			return c, nil
		}
		errs = append(errs, err)
	}
	if ctx.Err() != nil {
		return nil, dsec.E(dsec.ClassOf(ctx.Err()), op, string(id), context.Cause(ctx))
	}
	return nil, r.explain(op, sb, dsec.Errorf(dsec.Unavailable, op, string(id), "port %d: %w", port, errs[0]))
}

// dialIn connects from inside a network namespace. A socket stays in the
// namespace it was made in, so only its making needs a thread there.
func dialIn(ctx context.Context, netns *os.File, to netip.AddrPort) (net.Conn, error) {
	family := unix.AF_INET
	if to.Addr().Is6() {
		family = unix.AF_INET6
	}
	var fd int
	err := linux.OnThread(func() (err error) {
		if err := linux.JoinNS(netns, unix.CLONE_NEWNET); err != nil {
			return err
		}
		fd, err = unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP)
		return os.NewSyscallError("socket", err)
	})
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), to.String())
	defer f.Close()
	if err := connect(ctx, f, to); err != nil {
		return nil, err
	}
	return net.FileConn(f) // a duplicate
}

// connect waits for the connection through the runtime's poller.
func connect(ctx context.Context, f *os.File, to netip.AddrPort) error {
	var sa unix.Sockaddr
	if a := to.Addr(); a.Is4() {
		sa = &unix.SockaddrInet4{Port: int(to.Port()), Addr: a.As4()}
	} else {
		sa = &unix.SockaddrInet6{Port: int(to.Port()), Addr: a.As16()}
	}
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	if deadline, ok := ctx.Deadline(); ok {
		if err := f.SetDeadline(deadline); err != nil {
			return err
		}
	}
	stop := context.AfterFunc(ctx, func() { _ = f.SetDeadline(aLongTimeAgo) })
	defer stop()
	started := false
	var cerr error
	err = raw.Write(func(fd uintptr) bool {
		if !started {
			started = true
			cerr = unix.Connect(int(fd), sa)
			return !errors.Is(cerr, unix.EINPROGRESS)
		}
		var n int
		n, cerr = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ERROR)
		if cerr == nil && n != 0 {
			cerr = unix.Errno(n)
		}
		if cerr == nil {
			// A wake-up from before the connect proves nothing.
			_, cerr = unix.Getpeername(int(fd))
			return !errors.Is(cerr, unix.ENOTCONN)
		}
		return true
	})
	if err != nil {
		return err
	}
	return os.NewSyscallError("connect", cerr)
}

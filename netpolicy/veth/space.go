package veth

import (
	"errors"
	"fmt"
	"os"
	"runtime"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/linux"
)

// space is a network namespace one can talk to: the library's handle, and a
// socket for the request that the library cannot make.
type space struct {
	*netlink.Handle
	raw map[int]*nl.SocketHandle
}

func spaceIn(ns *os.File) (*space, error) {
	at := netns.NsHandle(int(ns.Fd()))
	h, err := netlink.NewHandleAt(at, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open netlink in %s: %w", ns.Name(), err)
	}
	return &space{Handle: h}, nil
}

// rawSpaceIn is spaceIn with the socket.
func rawSpaceIn(ns *os.File) (*space, error) {
	s, err := spaceIn(ns)
	if err != nil {
		return nil, err
	}
	sock, err := nl.GetNetlinkSocketAt(netns.NsHandle(int(ns.Fd())), netns.None(), unix.NETLINK_ROUTE)
	if err != nil {
		s.Close()
		return nil, fmt.Errorf("open netlink in %s: %w", ns.Name(), err)
	}
	s.raw = map[int]*nl.SocketHandle{unix.NETLINK_ROUTE: {Socket: sock}}
	return s, nil
}

// spaceHere is the namespace of the calling thread.
func spaceHere() (*space, error) {
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open netlink: %w", err)
	}
	s := &space{Handle: h}
	sock, err := nl.Subscribe(unix.NETLINK_ROUTE)
	if err != nil {
		s.Close()
		return nil, fmt.Errorf("open netlink: %w", err)
	}
	s.raw = map[int]*nl.SocketHandle{unix.NETLINK_ROUTE: {Socket: sock}}
	return s, nil
}

// index of a link, asked for without waiting for those who change some. Only a
// space with the socket can be asked.
func (s *space) index(name string) (int, error) {
	r, err := unix.NewIfreq(name)
	if err != nil {
		return 0, err
	}
	if err := unix.IoctlIfreq(s.raw[unix.NETLINK_ROUTE].Socket.GetFd(), unix.SIOCGIFINDEX, r); err != nil {
		return 0, err
	}
	return int(r.Uint32()), nil
}

// dumpTries is how often a list is asked for again that changed while it was read.
const dumpTries = 100

// whole asks for a list until none of it changed meanwhile.
func whole[T any](ask func() ([]T, error)) (list []T, err error) {
	for range dumpTries {
		if list, err = ask(); !errors.Is(err, netlink.ErrDumpInterrupted) {
			break
		}
	}
	return list, err
}

// LinkList lists all links as they are at one moment.
func (s *space) LinkList() ([]netlink.Link, error) { return whole(s.Handle.LinkList) }

// AddrList is LinkList of the addresses of a link.
func (s *space) AddrList(l netlink.Link, family int) ([]netlink.Addr, error) {
	return whole(func() ([]netlink.Addr, error) { return s.Handle.AddrList(l, family) })
}

// RouteList is LinkList of routes.
func (s *space) RouteList(l netlink.Link, family int) ([]netlink.Route, error) {
	return whole(func() ([]netlink.Route, error) { return s.Handle.RouteList(l, family) })
}

func (s *space) Close() {
	for _, r := range s.raw {
		r.Close()
	}
	s.Handle.Close()
}

// inNamespace runs f on a thread that is in the namespace. If the thread
// cannot come back it is thrown away.
func inNamespace(ns *os.File, f func() error) error {
	return onThread(func() error { return unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET) }, f)
}

func onThread(enter, f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // until it is back: a locked goroutine's end ends its thread
		home, err := os.Open("/proc/thread-self/ns/net")
		if err != nil {
			done <- err
			return
		}
		defer func() { _ = home.Close() }()
		if err := enter(); err != nil {
			runtime.UnlockOSThread()
			done <- fmt.Errorf("enter network namespace: %w", err)
			return
		}
		err = f()
		if unix.Setns(int(home.Fd()), unix.CLONE_NEWNET) == nil {
			runtime.UnlockOSThread()
		}
		done <- err
	}()
	return <-done
}

// newNamespace makes a network namespace that its descriptor keeps.
func newNamespace() (ns *os.File, err error) {
	err = onThread(func() error { return unix.Unshare(unix.CLONE_NEWNET) }, func() error {
		ns, err = os.Open("/proc/thread-self/ns/net")
		return err
	})
	return ns, err
}

// nodeNamespace returns a descriptor of our own.
func nodeNamespace(given *os.File) (*os.File, error) {
	if given == nil {
		return os.Open("/proc/self/ns/net")
	}
	return linux.Duplicate(given)
}

// sysctl sets one of the thread's namespace. A kernel without IPv6 has no
// settings for it.
func sysctl(name, value string) error {
	err := os.WriteFile("/proc/sys/"+name, []byte(value), 0o644)
	if errors.Is(err, os.ErrNotExist) && len(name) > 8 && name[:8] == "net/ipv6" {
		return nil
	}
	return err
}

// routerSysctls are set before the first link is made.
func routerSysctls() error {
	for _, s := range [][2]string{
		{"net/ipv4/ip_forward", "1"},
		{"net/ipv4/conf/all/rp_filter", "1"}, // a sandbox sends from its own address only
		{"net/ipv4/conf/default/rp_filter", "1"},
		{"net/ipv4/conf/all/send_redirects", "0"},
		{"net/ipv4/conf/default/send_redirects", "0"},
		{"net/ipv6/conf/all/disable_ipv6", "1"},
		{"net/ipv6/conf/default/disable_ipv6", "1"},
	} {
		if err := sysctl(s[0], s[1]); err != nil {
			return err
		}
	}
	return nil
}

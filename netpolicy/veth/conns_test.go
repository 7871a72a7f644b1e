package veth

import (
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/opendsec/dsec"
)

// echo answers datagrams.
func echo(t *testing.T, ns *os.File, addr string) {
	t.Helper()
	var c net.PacketConn
	if err := inNamespace(ns, func() (err error) { c, err = net.ListenPacket("udp4", addr); return err }); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		b := make([]byte, 64)
		for {
			n, from, err := c.ReadFrom(b)
			if err != nil {
				return
			}
			_, _ = c.WriteTo(b[:n], from)
		}
	})
	t.Cleanup(func() { _ = c.Close(); wg.Wait() })
}

// ask sends a datagram over each of n sockets and counts the answers. The
// sockets are closed at once: the kernel goes on following what they began.
func ask(t *testing.T, ns *os.File, n int) (answers int) {
	t.Helper()
	err := inNamespace(ns, func() error {
		for i := range n {
			c, err := net.Dial("udp4", public+":5353")
			if err != nil {
				return err
			}
			_, err = fmt.Fprint(c, i)
			wait := time.Second
			if answers < i { // it is refused by now: what is lost is lost at once
				wait = 5 * time.Millisecond
			}
			_ = c.SetReadDeadline(time.Now().Add(wait))
			if _, rerr := c.Read(make([]byte, 64)); rerr == nil {
				answers++
			}
			_ = c.Close()
			if err != nil && !errors.Is(err, os.ErrPermission) {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return answers
}

// followed counts the connections that the kernel follows in a namespace.
func followed(t *testing.T, ns *os.File) (n int) {
	t.Helper()
	err := inNamespace(ns, func() error {
		b, err := os.ReadFile("/proc/sys/net/netfilter/nf_conntrack_count")
		if err == nil {
			n, err = strconv.Atoi(strings.TrimSpace(string(b)))
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func TestOneSandboxCannotFillTheTableOfConnections(t *testing.T) {
	// The kernel forgets connections that another processor is about to begin or
	// has just ended, so its count may be off by some.
	const most, off = 40, 4
	l := newLab(t)
	echo(t, l.outside, "0.0.0.0:5353")
	n := testNetwork(t, l, Config{Conns: most})
	greedy, _ := attach(t, n, "greedy", dsec.NetworkOpen)
	neighbour, _ := attach(t, n, "neighbour", dsec.NetworkOpen)
	before := followed(t, l.node)
	if got := ask(t, greedy, 5*most); got < most-off || got > most+off {
		t.Errorf("%d connections, want %d", got, most)
	}
	for name, ns := range map[string]*os.File{"router": n.router, "node": l.node} {
		if got := followed(t, ns) - before; got > most+off {
			t.Errorf("the %s follows %d connections, want at most %d", name, got, most)
		}
	}
	if got := ask(t, neighbour, most/2); got != most/2 {
		t.Errorf("%d of %d requests of the neighbour were answered", got, most/2)
	}
	if said, err := dial(neighbour, "tcp4", public+":80"); said != nodeAddr {
		t.Errorf("TCP of the neighbour: %q %v", said, err)
	}
	refused := 0
	for range off + 1 {
		if _, err := dial(greedy, "tcp4", public+":80"); err != nil {
			refused++
		}
	}
	if refused == 0 {
		t.Error("no connection was one too many")
	}
	if got, err := n.Refused(t.Context()); err != nil || got < 4*most-off {
		t.Errorf("%d packets counted, %v", got, err)
	}
}

// TestConnectionsThatEndedMakeRoom: the limit is of those at once.
func TestConnectionsThatEndedMakeRoom(t *testing.T) {
	const most = 10
	l := newLab(t)
	n := testNetwork(t, l, Config{Conns: most})
	ns, _ := attach(t, n, "a", dsec.NetworkOpen)
	short := func() error { return sysctl("net/netfilter/nf_conntrack_tcp_timeout_time_wait", "1") }
	if err := inNamespace(n.router, short); err != nil {
		t.Fatal(err)
	}
	for i := range 3 * most {
		eventually(t, fmt.Sprint("connection ", i, " is made"), func() bool {
			said, err := dial(ns, "tcp4", public+":80")
			return err == nil && said == nodeAddr
		})
	}
}

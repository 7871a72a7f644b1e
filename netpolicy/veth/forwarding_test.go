package veth

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/opendsec/dsec"
)

// another opens a network beside others of the same node, and ends with the
// test if it is not removed before.
func another(t *testing.T, l lab, name, subnet string) *Network {
	t.Helper()
	n, err := Open(t.Context(), Config{Gate: testGate(t), Deny: labDeny(), Name: name, Node: l.node, Subnet: netip.MustParsePrefix(subnet)})
	if errors.Is(err, dsec.Unsupported.Err()) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func remove(t *testing.T, n *Network) {
	t.Helper()
	if err := n.Remove(context.WithoutCancel(t.Context())); err != nil {
		t.Error(err)
	}
}

// TestTheLastNetworkOfANodeTurnsForwardingOff: the one that turned it on may go
// before others whose sandboxes need it.
func TestTheLastNetworkOfANodeTurnsForwardingOff(t *testing.T) {
	l := newLab(t)
	first := another(t, l, "one", "10.77.0.0/24")
	second := another(t, l, "two", "10.78.0.0/24")
	ns, _ := attach(t, second, "a", dsec.NetworkOpen)
	remove(t, first)
	if said, err := dial(ns, "tcp4", public+":80"); said != nodeAddr {
		t.Errorf("after the first network went: %q %v", said, err)
	}
	third := another(t, l, "three", "10.79.0.0/24")
	remove(t, second)
	ns, _ = attach(t, third, "b", dsec.NetworkOpen)
	if said, err := dial(ns, "tcp4", public+":80"); said != nodeAddr {
		t.Errorf("after the second network went: %q %v", said, err)
	}
	remove(t, third)
	left(t, l.node) // and it is off again
}

func TestNetworksThatComeAndGoTogetherLeaveForwardingAsItWas(t *testing.T) {
	for _, was := range []string{"0", "1"} {
		l := newLab(t)
		if err := inNamespace(l.node, func() error { return sysctl("net/ipv4/ip_forward", was) }); err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		for i, name := range []string{"one", "two", "three", "four"} {
			wg.Go(func() {
				for range 3 {
					n, err := Open(t.Context(), Config{Gate: testGate(t), Deny: labDeny(), Name: name, Node: l.node, Subnet: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 80, byte(i), 0}), 24)})
					if err != nil {
						t.Error(err)
						return
					}
					remove(t, n)
				}
			})
		}
		wg.Wait()
		err := inNamespace(l.node, func() error {
			b, err := os.ReadFile("/proc/sys/net/ipv4/ip_forward")
			if err == nil && strings.TrimSpace(string(b)) != was {
				t.Errorf("forwarding was %s and is %s", was, b)
			}
			return err
		})
		if err != nil {
			t.Error(err)
		}
	}
}

// TestWhatANetworkLeftIsTakenAwayWithoutIt: its keeper may be gone.
func TestWhatANetworkLeftIsTakenAwayWithoutIt(t *testing.T) {
	l := newLab(t)
	n := another(t, l, "gone", "10.77.0.0/24")
	if err := n.Close(); err != nil { // as if it had been killed
		t.Fatal(err)
	}
	for range 2 {
		if err := Clean(t.Context(), Config{Name: "gone", Node: l.node}); err != nil {
			t.Fatal(err)
		}
	}
	left(t, l.node)
}

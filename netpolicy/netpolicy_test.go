package netpolicy

import (
	"net/netip"
	"testing"

	"github.com/opendsec/dsec"
)

func TestFilesOfASandboxWithoutNetwork(t *testing.T) {
	l := Lease{Mode: dsec.NetworkNone}
	if got := string(l.ResolvConf()); got != "" {
		t.Errorf("resolv.conf is %q, want empty: a name must fail at once, not after a wait for a server", got)
	}
	want := "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n127.0.1.1\tbox\n"
	if got := string(l.Hosts("box")); got != want {
		t.Errorf("hosts is %q, want %q", got, want)
	}
}

func TestFilesOfASandboxWithANetwork(t *testing.T) {
	l := Lease{Mode: dsec.NetworkOpen, Address: netip.MustParseAddr("10.1.2.3"), DNS: []netip.Addr{netip.MustParseAddr("9.9.9.9")}}
	if got := string(l.ResolvConf()); got != "nameserver 9.9.9.9\noptions timeout:2 attempts:2\n" {
		t.Errorf("resolv.conf is %q", got)
	}
	want := "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n10.1.2.3\tbox\n"
	if got := string(l.Hosts("box")); got != want {
		t.Errorf("hosts is %q, want %q", got, want)
	}
	if got := string(l.Hosts("localhost")); got != "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n" {
		t.Errorf("hosts of localhost is %q", got)
	}
}

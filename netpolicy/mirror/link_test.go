package mirror

import (
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/netpolicy"
)

// TestAgentAndMirrorFindEachOther: the agent brings the listener, and says who asks;
// the next agent, and the next mirror, go on at the same port; without an agent
// nobody is known.
func TestAgentAndMirrorFindEachOther(t *testing.T) {
	up := newUpstream(t)
	up.pypi(t, "demo", release{"1.0", before}, release{"2.0", after})
	socket, quiet := filepath.Join(t.TempDir(), "s"), slog.New(slog.DiscardHandler)
	mirror := func() (stop func()) {
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
		if err != nil {
			t.Fatal(err)
		}
		k := &Link{Log: quiet}
		m, err := New(Config{Dir: t.TempDir() + "/c", Upstreams: Upstreams{PyPI: up.URL}, Lookup: k.Lookup})
		if err != nil {
			t.Fatal(err)
		}
		done := make(chan error, 1)
		go func() { done <- k.Run(l, m) }()
		return func() {
			_ = l.Close()
			if err := <-done; err != nil {
				t.Error(err)
			}
			_ = m.Close()
		}
	}
	probe, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	at := probe.Addr().String()
	_ = probe.Close()
	deny := make([]string, dsec.MaxDenied) // the largest answer there is
	for i := range deny {
		deny[i] = fmt.Sprintf("x%d%s", i, strings.Repeat("y", 240))
	}
	agent := func(cut time.Time) *Attendance {
		return Attend(Agent{Socket: socket, Log: quiet, Listen: func() (net.Listener, error) { return net.Listen("tcp4", at) },
			Lookup: func(a netip.Addr) (Access, bool) {
				return Access{Services: []string{"pypi"}, Cutoff: cut, Deny: map[string][]string{"pypi": deny}}, a.IsLoopback()
			}})
	}
	shows := func(what string, newer bool) {
		t.Helper()
		var last string
		for end := time.Now().Add(20 * time.Second); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
			r, err := http.NewRequest(http.MethodGet, "http://"+at+"/simple/demo/", nil)
			if err != nil {
				t.Fatal(err)
			}
			r.Host, r.Close = netpolicy.MirrorHost("pypi"), true
			resp, err := http.DefaultClient.Do(r)
			if err != nil {
				last = err.Error()
				continue
			}
			b := make([]byte, 4096)
			n, _ := resp.Body.Read(b)
			_ = resp.Body.Close()
			if last = string(b[:n]); strings.Contains(last, "demo-1.0") && strings.Contains(last, "demo-2.0") == newer {
				return
			}
		}
		t.Fatalf("%s: %s", what, last)
	}
	first := agent(cutoff) // before the mirror is there
	stop := mirror()
	shows("with a cut-off", false)
	_ = first.Close()
	second := agent(time.Time{})
	shows("the next agent", true)
	stop()
	stop = mirror()
	shows("the next mirror", true)
	_ = second.Close()
	stop()
}

// TestWithoutAnAgentNobodyIsKnown.
func TestWithoutAnAgentNobodyIsKnown(t *testing.T) {
	k := &Link{Log: slog.New(slog.DiscardHandler)}
	if _, ok := k.Lookup(netip.MustParseAddr("127.0.0.1")); ok {
		t.Error("somebody is")
	}
}

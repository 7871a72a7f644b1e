package veth

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/netpolicy"
	"github.com/opendsec/dsec/netpolicy/mirror"
)

// pypi is a registry with a project that has a release on each side of 2025-01-31.
func pypi(t *testing.T) *httptest.Server {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var files []map[string]any
		for version, at := range map[string]string{"1.0": "2024-06-01T00:00:00Z", "2.0": "2025-06-01T00:00:00Z"} {
			files = append(files, map[string]any{"filename": "demo-" + version + ".tar.gz", "url": "http://" + r.Host + "/x", "upload-time": at,
				"hashes": map[string]string{"sha256": strings.Repeat("0", 64)}})
		}
		_ = json.NewEncoder(w).Encode(map[string]any{"name": "demo", "files": files})
	}))
	t.Cleanup(s.Close)
	return s
}

// serveMirror serves the packages of a network from a registry.
func serveMirror(t *testing.T, n *Network, upstream string) {
	t.Helper()
	l, err := n.ListenMirror()
	if err != nil {
		t.Fatal(err)
	}
	m, err := mirror.New(mirror.Config{Dir: t.TempDir() + "/cache", Upstreams: mirror.Upstreams{PyPI: upstream, NPM: upstream},
		Lookup: func(a netip.Addr) (mirror.Access, bool) {
			p, ok := n.Policy(a)
			access, some := mirror.AccessOf(p)
			return access, ok && some
		}})
	if err != nil {
		t.Fatal(err)
	}
	s := mirror.Server(m)
	done := make(chan error, 1)
	go func() { done <- s.Serve(mirror.Listen(l)) }()
	t.Cleanup(func() {
		_ = s.Close()
		<-done
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
}

// fetch gets a URL as a program in a sandbox does: its name from the resolver, and
// the rest by TCP.
func fetch(t *testing.T, n *Network, ns *os.File, url string) string {
	t.Helper()
	dial := func(ctx context.Context, network, addr string) (c net.Conn, err error) {
		host, port, _ := net.SplitHostPort(addr)
		at := []string{host}
		if _, err := netip.ParseAddr(host); err != nil {
			if at, err = lookUp(t, n, ns, "udp", host+"."); err != nil {
				return nil, err
			}
		}
		err = inNamespace(ns, func() (err error) {
			c, err = (&net.Dialer{Timeout: time.Second}).DialContext(ctx, network, net.JoinHostPort(at[0], port))
			return err
		})
		return c, err
	}
	c := http.Client{Transport: &http.Transport{DialContext: dial, DisableKeepAlives: true}, Timeout: 10 * time.Second}
	r, err := c.Get(url)
	if err != nil {
		return "error: " + err.Error()
	}
	defer func() { _ = r.Body.Close() }()
	b, err := io.ReadAll(r.Body)
	return fmt.Sprintf("%d %s %v", r.StatusCode, b, err)
}

// TestTheMirrorAndNothingElse: of a sandbox whose mode is mirror-only the names lead
// to the mirror, which shows what its cut-off lets it see; each has its own; others
// do not reach it; and a change ends it.
func TestTheMirrorAndNothingElse(t *testing.T) {
	l := newLab(t)
	n := testNetwork(t, l, Config{Mirror: true})
	stop := resolve(t, n)
	t.Cleanup(stop)
	serveMirror(t, n, pypi(t).URL)
	cut := dsec.NetworkPolicy{Mode: dsec.NetworkMirror, Cutoff: time.Date(2025, 1, 31, 0, 0, 0, 0, time.UTC)}
	now := dsec.NetworkPolicy{Mode: dsec.NetworkAllow, Allow: []dsec.NetworkRule{{Mirror: "pypi"}}}
	a, lease := attachPolicy(t, n, "a", cut)
	b, _ := attachPolicy(t, n, "b", now)
	other, _ := attachPolicy(t, n, "c", dsec.NetworkPolicy{Mode: dsec.NetworkAllow, Allow: []dsec.NetworkRule{{CIDR: public}}})
	free, _ := attachPolicy(t, n, "d", open)
	if len(lease.DNS) != 1 || lease.DNS[0] != n.Gateway() {
		t.Errorf("name servers %v", lease.DNS)
	}
	const index = "http://pypi.mirror.dsec/simple/demo/"
	if got := fetch(t, n, a, index); !strings.HasPrefix(got, "200") || !strings.Contains(got, "demo-1.0") || strings.Contains(got, "demo-2.0") {
		t.Errorf("with a cut-off: %s", got)
	}
	if got := fetch(t, n, b, index); !strings.Contains(got, "demo-1.0") || !strings.Contains(got, "demo-2.0") {
		t.Errorf("without: %s", got)
	}
	if got := fetch(t, n, b, "http://npm.mirror.dsec/demo"); !strings.Contains(got, "no such host") {
		t.Errorf("a service that no rule opens: %s", got)
	}
	byAddress := "http://" + n.Gateway().String() + "/simple/demo/"
	for name, ns := range map[string]*os.File{"another allow-list": other, "open": free} {
		if got := fetch(t, n, ns, byAddress); !strings.HasPrefix(got, "error") {
			t.Errorf("%s: %s", name, got)
		}
	}
	for _, to := range []string{public + ":80", nodeAddr + ":80", n.Gateway().String() + ":81"} {
		if said, err := dial(a, "tcp4", to); err == nil {
			t.Errorf("%s answers %q", to, said)
		}
	}
	change(t, n, "a", allow(), a)
	if got := fetch(t, n, a, byAddress); !strings.HasPrefix(got, "error") {
		t.Errorf("after it was closed: %s", got)
	}
	if got := fetch(t, n, a, index); !strings.Contains(got, "no such host") {
		t.Errorf("after it was closed: %s", got)
	}
}

// TestWithoutAMirrorNobodyIsPromisedOne.
func TestWithoutAMirrorNobodyIsPromisedOne(t *testing.T) {
	n := testNetwork(t, newLab(t), Config{})
	_, err := n.Attach(t.Context(), "a", dsec.NetworkPolicy{Mode: dsec.NetworkMirror}, netpolicy.Place{NetNS: testNamespace(t)})
	if dsec.ClassOf(err) != dsec.Unsupported || !strings.Contains(err.Error(), "no mirror") {
		t.Errorf("%v", err)
	}
}

// TestTheMirrorCountsAmongTheConnections of a sandbox: they are in the same table.
func TestTheMirrorCountsAmongTheConnections(t *testing.T) {
	n := testNetwork(t, newLab(t), Config{Mirror: true, Conns: 8})
	l, err := n.ListenMirror()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	ns, _ := attachPolicy(t, n, "a", dsec.NetworkPolicy{Mode: dsec.NetworkMirror})
	made := 0
	for range 12 {
		err := inNamespace(ns, func() error {
			c, err := (&net.Dialer{Timeout: 200 * time.Millisecond}).Dial("tcp4", n.Gateway().String()+":80")
			if err == nil {
				t.Cleanup(func() { _ = c.Close() })
			}
			return err
		})
		if err == nil {
			made++
		}
	}
	if made != 8 {
		t.Errorf("%d connections, want 8", made)
	}
	if refused, err := n.Refused(t.Context()); err != nil || refused < 4 {
		t.Errorf("%d refused, %v", refused, err)
	}
}

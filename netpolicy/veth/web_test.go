package veth

import (
	"bufio"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"
)

// serveHTTP answers with whom it was asked for. What asks to upgrade is echoed.
func serveHTTP(t *testing.T, ns *os.File, addr string) {
	t.Helper()
	var l net.Listener
	if err := inNamespace(ns, func() (err error) { l, err = net.Listen("tcp4", addr); return err }); err != nil {
		t.Fatal(err)
	}
	s := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Upgrade") == "" {
			body, _ := io.ReadAll(r.Body)
			fmt.Fprintf(w, "%s %s %s %s %d", r.Host, r.Method, r.RequestURI, r.Header.Get("X-Forwarded-For"), len(body))
			return
		}
		c, b, err := http.NewResponseController(w).Hijack()
		if err != nil {
			return
		}
		defer func() { _ = c.Close() }()
		_, _ = io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
		_, _ = io.Copy(c, b)
	})}
	done := make(chan struct{})
	go func() { defer close(done); _ = s.Serve(l) }()
	t.Cleanup(func() { _ = s.Close(); <-done })
}

// web is a client that says what it likes.
type web struct {
	net.Conn
	r *bufio.Reader
}

func browse(t *testing.T, ns *os.File, to string) *web {
	t.Helper()
	c := stream(t, ns, to)
	return &web{c, bufio.NewReader(c)}
}

func (w *web) ask(t *testing.T, request string) (status int, body string) {
	t.Helper()
	_ = w.SetDeadline(time.Now().Add(5 * time.Second))
	_, err := io.WriteString(w, request)
	if err != nil {
		return 0, err.Error()
	}
	r, err := http.ReadResponse(w.r, nil)
	if err != nil {
		return 0, err.Error()
	}
	if r.StatusCode == http.StatusSwitchingProtocols {
		return r.StatusCode, ""
	}
	text, err := io.ReadAll(r.Body)
	if err != nil { // who speaks something else may be cut off before the end of the answer
		return r.StatusCode, err.Error()
	}
	return r.StatusCode, string(text)
}

// TestEveryRequestIsForAnAllowedHost: of one connection, too, and a change ends
// what it closes.
func TestEveryRequestIsForAnAllowedHost(t *testing.T) {
	n, k, outside := town(t)
	serveHTTP(t, outside, "0.0.0.0:8090") // the lab has port 80 of all addresses
	if err := nft(t.Context(), outside, "table ip test { chain in { type nat hook prerouting priority dstnat; ip daddr "+second+" tcp dport 80 redirect to :8090; }; }"); err != nil {
		t.Fatal(err)
	}
	ns, _ := attachPolicy(t, n, "a", byName("far.example", "*.far.example", "good.example"))
	asks(t, n, ns, "far.example.", "www.far.example.", "good.example.")
	c := browse(t, ns, second+":80")
	for host, want := range map[string]int{"far.example": 200, "FAR.example.:80": 200, "www.far.example": 200} {
		status, body := c.ask(t, "GET /a%2Fb?x=%zz;y HTTP/1.1\r\nHost: "+host+"\r\nX-Forwarded-For: me\r\n\r\n")
		if status != want || body != host+" GET /a%2Fb?x=%zz;y me 0" {
			t.Errorf("%s: %d %q", host, status, body)
		}
	}
	chunked := "POST / HTTP/1.1\r\nHost: far.example\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
	if status, body := c.ask(t, chunked); status != 200 || body != "far.example POST /  3" {
		t.Errorf("with a body: %d %q", status, body)
	}
	for _, x := range []struct{ request, why string }{
		{"GET / HTTP/1.1\r\nHost: other.example\r\n\r\n", "http other.example at 203.0.113.3:80: it is no allowed name"},
		{"GET / HTTP/1.1\r\nHost: good.example\r\n\r\n", "the address was not handed out for it"},
		{"GET / HTTP/1.0\r\n\r\n", "it says no host"},
		{"GET / HTTP/1.1\r\nHost: far.example:8080\r\n\r\n", "it says no host"},
		{"GET http://far.example/ HTTP/1.1\r\nHost: far.example\r\n\r\n", "it asks for a proxy"},
		{"CONNECT far.example:443 HTTP/1.1\r\nHost: far.example:443\r\n\r\n", "it asks for a proxy"},
	} {
		c := browse(t, ns, second+":80")
		if status, body := c.ask(t, "GET / HTTP/1.1\r\nHost: far.example\r\n\r\n"); status != 200 {
			t.Errorf("%d %q", status, body)
		}
		if status, body := c.ask(t, x.request); status != 403 || !strings.Contains(x.why, strings.TrimSpace(strings.TrimPrefix(body, "dsec: "))) {
			t.Errorf("%q: %d %q", x.request, status, body)
		}
		if !refusedRow(t, k, n, "a", x.why) {
			t.Errorf("%q: not counted as %q", x.request, x.why)
		}
	}
	for _, request := range []string{"GET / HTTP/1.1\r\nHost: far.example\r\nHost: other.example\r\n\r\n", "SSH-2.0-x\r\n\r\n", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"} {
		if status, body := browse(t, ns, second+":80").ask(t, request); status == 200 {
			t.Errorf("%q: %d %q", request, status, body)
		}
	}
	if status, body := browse(t, ns, second+":80").ask(t, "GET / HTTP/1.1\r\nHost: far.example\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n\r\n"); status != 200 {
		t.Errorf("an upgrade to HTTP/2: %d %q", status, body)
	}
	up := browse(t, ns, second+":80")
	if status, body := up.ask(t, "GET / HTTP/1.1\r\nHost: www.far.example\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"); status != 101 {
		t.Fatalf("upgrade: %d %q", status, body)
	}
	echoes := func() error {
		_ = up.SetDeadline(time.Now().Add(time.Second))
		if _, err := up.Write([]byte("x")); err != nil {
			return err
		}
		_, err := io.ReadFull(up.r, make([]byte, 1))
		return err
	}
	if err := echoes(); err != nil {
		t.Error(err)
	}
	change(t, n, "a", byName("far.example"), ns)
	if err := echoes(); err == nil || os.IsTimeout(err) {
		t.Errorf("a connection to a name that is closed: %v", err)
	}
	if status, body := browse(t, ns, second+":80").ask(t, "GET / HTTP/1.1\r\nHost: far.example\r\n\r\n"); status != 200 {
		t.Errorf("another name: %d %q", status, body)
	}
	change(t, n, "a", byName("good.example"), ns)
	eventually(t, "nothing is left of what was closed", func() bool { return connections(t, outside) == 0 })
	asks(t, n, ns, "good.example.")
	if _, err := speak(ns, public+":443", &tls.Config{ServerName: "good.example"}); err != nil {
		t.Error(err)
	}
}

package gateway_test

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/iam"
)

// listening starts an echo server in a sandbox and waits until it is there.
func listening(t *testing.T, c *client.Client, id dsec.SandboxID, port uint16) net.Conn {
	t.Helper()
	_, err := c.Exec(t.Context(), id, sh(fmt.Sprintf("nc -l -p %d -e cat", port)))
	must(t, err)
	var conn net.Conn
	eventually(t, "something listens", func() bool {
		conn, err = c.Dial(t.Context(), id, port)
		return err == nil
	})
	t.Cleanup(func() { _ = conn.Close() })
	_ = conn.SetDeadline(time.Now().Add(10 * time.Second))
	return conn
}

func TestTunnelReachesAPort(t *testing.T) {
	e := start(t)
	c := e.local()
	sb := e.sandbox(c)
	_, err := c.Dial(t.Context(), sb.ID, 8080)
	wantClass(t, err, dsec.Unavailable)
	conn := listening(t, c, sb.ID, 8080)
	_, err = io.WriteString(conn, "through")
	must(t, err)
	got := make([]byte, 7)
	_, err = io.ReadFull(conn, got)
	if err != nil || string(got) != "through" {
		t.Fatalf("%q, %v", got, err)
	}
}

func TestB15_PortIsExact(t *testing.T) {
	e := start(t)
	c := e.local()
	sb := e.sandbox(c)
	_ = listening(t, c, sb.ID, 8080)
	_, err := c.Dial(t.Context(), sb.ID, 80)
	wantClass(t, err, dsec.Unavailable)
}

// web is a server as one may run in a sandbox: it tells what it was asked, and
// upgrades to an echo.
func web(t *testing.T) string {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Upgrade") != "websocket" {
			fmt.Fprintf(w, "%s %s host=%s auth=%q key=%q", r.Method, r.URL.RequestURI(), r.Host, r.Header.Get("Authorization"), r.Header.Get("X-Api-Key"))
			return
		}
		conn, rw, err := w.(http.Hijacker).Hijack()
		if err != nil {
			return
		}
		defer conn.Close()
		_, _ = io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
		_, _ = io.Copy(conn, rw)
	}))
	t.Cleanup(s.Close)
	return s.Listener.Addr().String()
}

func TestPortsPassHTTPOnWithoutOurKeys(t *testing.T) {
	e := start(t)
	e.node.web = web(t)
	_, key, err := e.keys.Create(t.Context(), iam.Request{Project: "p"})
	must(t, err)
	c, err := client.New(client.Config{URL: "http://" + e.tcp, Key: key})
	must(t, err)
	sb := e.sandbox(c)
	for _, x := range []struct{ header, value, want string }{
		{"Authorization", "Bearer " + key, `auth="" key=""`},
		{"Authorization", "Basic dTpw", `auth="Basic dTpw" key=""`},
	} {
		req, _ := http.NewRequest(http.MethodGet, fmt.Sprintf("http://%s/v1/sandboxes/%s/ports/8000/a%%2Fb/c?q=1", e.tcp, sb.ID), nil)
		req.Header.Set("X-Api-Key", key)
		req.Header.Set(x.header, x.value)
		resp, err := http.DefaultClient.Do(req)
		must(t, err)
		b, _ := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		if want := "GET /a%2Fb/c?q=1 host=localhost:8000 " + x.want; string(b) != want {
			t.Errorf("%q, want %q", b, want)
		}
	}
}

// On the socket the uid says who one is; Authorization is the server's inside.
func TestPortsPassForeignTokensOn(t *testing.T) {
	e := start(t)
	e.node.web = web(t)
	sb := e.sandbox(e.local())
	conn, err := net.Dial("unix", e.socket)
	must(t, err)
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(10 * time.Second))
	fmt.Fprintf(conn, "GET /v1/sandboxes/%s/ports/8000/ HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer theirs\r\n\r\n", sb.ID)
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	must(t, err)
	b, _ := io.ReadAll(resp.Body)
	if !strings.Contains(string(b), `auth="Bearer theirs"`) {
		t.Fatalf("%s", b)
	}
}

func TestPortsPassWebSocketsOn(t *testing.T) {
	e := start(t)
	e.node.web = web(t)
	sb := e.sandbox(e.local())
	conn, err := net.Dial("unix", e.socket)
	must(t, err)
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(10 * time.Second))
	fmt.Fprintf(conn, "GET /v1/sandboxes/%s/ports/8000/ws HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n", sb.ID)
	r := bufio.NewReader(conn)
	resp, err := http.ReadResponse(r, nil)
	if err != nil || resp.StatusCode != http.StatusSwitchingProtocols {
		t.Fatal(resp, err)
	}
	_, _ = io.WriteString(conn, "echo me")
	got := make([]byte, 7)
	if _, err := io.ReadFull(r, got); err != nil || string(got) != "echo me" {
		t.Fatalf("%q, %v", got, err)
	}
}

func TestPortsAreForTheirProjectOnly(t *testing.T) {
	e := start(t)
	e.node.web = web(t)
	mine, theirs := e.remote(iam.User, "mine"), e.remote(iam.User, "theirs")
	sb := e.sandbox(mine)
	get := func(project string) (int, string) {
		_, key, err := e.keys.Create(t.Context(), iam.Request{Project: project})
		must(t, err)
		req, _ := http.NewRequest(http.MethodGet, fmt.Sprintf("http://%s/v1/sandboxes/%s/ports/8000/", e.tcp, sb.ID), nil)
		req.Header.Set("X-Api-Key", key)
		resp, err := http.DefaultClient.Do(req)
		must(t, err)
		defer resp.Body.Close()
		b, _ := io.ReadAll(resp.Body)
		return resp.StatusCode, string(b)
	}
	if status, b := get("mine"); status != http.StatusOK || !strings.HasPrefix(b, "GET / ") {
		t.Fatal(status, b)
	}
	if status, b := get("theirs"); status != http.StatusNotFound { // though a connection of "mine" is idle
		t.Fatal(status, b)
	}
	_ = theirs
}

func TestConnectionsToASandboxAreBounded(t *testing.T) {
	const most = 4
	n := newThinNode()
	t.Cleanup(func() { _ = n.rt.Close() })
	arrived, hold := make(chan struct{}), make(chan struct{})
	web := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		close(arrived)
		<-hold
		_, _ = io.WriteString(w, "served")
	}))
	t.Cleanup(web.Close)
	n.web = strings.TrimPrefix(web.URL, "http://")
	e := (&env{t: t, node: n, service: n, conns: most}).start()
	c, ctx := e.local(), t.Context()
	sb, other := e.sandbox(c), e.sandbox(c)
	var open []net.Conn
	for range most - 1 {
		conn, err := c.Dial(ctx, sb.ID, 8000)
		must(t, err)
		open = append(open, conn)
	}
	get := func(id dsec.SandboxID) (*http.Response, error) {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+e.tcp+"/v1/sandboxes/"+string(id)+"/ports/8000/", nil)
		must(t, err)
		_, key, err := e.keys.Create(ctx, iam.Request{Role: iam.Admin})
		must(t, err)
		req.Header.Set("X-Api-Key", key)
		return http.DefaultClient.Do(req)
	}
	served := make(chan int, 1)
	go func() {
		resp, err := get(sb.ID)
		if err != nil {
			t.Error(err)
			served <- 0
			return
		}
		_ = resp.Body.Close()
		served <- resp.StatusCode
	}()
	select {
	case <-arrived: // over the last one there may be
	case <-time.After(15 * time.Second):
		t.Fatal("HTTP within the cap does not arrive")
	}
	_, err := c.Dial(ctx, sb.ID, 8000)
	wantClass(t, err, dsec.ResourceExhausted)
	resp, err := get(sb.ID)
	must(t, err)
	text, _ := io.ReadAll(resp.Body)
	_ = resp.Body.Close()
	if resp.StatusCode != http.StatusTooManyRequests || !strings.Contains(string(text), `"class":"resource_exhausted"`) {
		t.Errorf("HTTP beyond the cap: %d %s", resp.StatusCode, text)
	}
	conn, err := c.Dial(ctx, other.ID, 8000)
	must(t, err)
	_ = conn.Close()
	close(hold)
	if status := <-served; status != http.StatusOK {
		t.Errorf("within the cap: %d", status)
	}
	_ = open[0].Close()
	eventually(t, "a closed connection makes room", func() bool {
		conn, err := c.Dial(ctx, sb.ID, 8000)
		if err == nil {
			open = append(open, conn)
		}
		return err == nil
	})
	for _, conn := range open[1:] {
		_ = conn.Close()
	}
}

package egress

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"testing"

	"github.com/opendsec/dsec/netpolicy"
)

// TestAClientHoldsOneServerOpen, whatever many names it asks for: descriptors are
// counted by clients.
func TestAClientHoldsOneServerOpen(t *testing.T) {
	up := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { _, _ = io.WriteString(w, r.Host) }))
	defer up.Close()
	at := netip.MustParseAddr("127.0.0.1")
	to := netip.AddrPortFrom(netip.MustParseAddr("203.0.113.7"), 80)
	listening := make(chan net.Addr, 1)
	var d net.Dialer
	s := New(Config{Places: 16, Original: func(*net.TCPConn) (netip.AddrPort, error) { return to, nil },
		Dial: func(ctx context.Context, _ netip.AddrPort) (net.Conn, error) {
			return d.DialContext(ctx, "tcp4", up.Listener.Addr().String())
		},
		Listen: func(netip.AddrPort) (net.Listener, error) {
			l, err := net.Listen("tcp4", "127.0.0.1:0")
			if err == nil {
				listening <- l.Addr()
			}
			return l, err
		}})
	defer s.Close()
	var names []string
	for i := range netpolicy.MaxNames {
		names = append(names, fmt.Sprintf("n%d.wild.example", i))
	}
	s.set(netpolicy.Admitted{Sandbox: "sb-1", Address: at, Names: []netpolicy.Name{{Name: "wild.example", Below: true, Open: []netpolicy.Ports{{Protocol: 6, First: 80, Last: 80}}}},
		Pins: map[netip.Addr][]string{to.Addr(): names}})
	if err := s.listen(netip.AddrPort{}, 16); err != nil {
		t.Fatal(err)
	}
	c, err := net.Dial("tcp4", (<-listening).String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	r, most := bufio.NewReader(c), 0
	for _, name := range names {
		if _, err := fmt.Fprintf(c, "GET / HTTP/1.1\r\nHost: %s\r\n\r\n", name); err != nil {
			t.Fatal(err)
		}
		resp, err := http.ReadResponse(r, nil)
		if err != nil {
			t.Fatal(err)
		}
		if b, err := io.ReadAll(resp.Body); err != nil || string(b) != name {
			t.Fatalf("%s: %q, %v", name, b, err)
		}
		s.mu.Lock()
		for x := range s.boxes[at].conns {
			most = max(most, len(x.servers))
		}
		s.mu.Unlock()
	}
	if most > 3 { // the one before may be about to close
		t.Errorf("%d servers are open for one client", most)
	}
}

package veth

import (
	"context"
	"crypto/ecdh"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/crypto/cryptobyte"
	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/netpolicy/egress"
)

// looking is who looks at names of a network: the socket, which stays, and a
// process without any power, which may be killed.
type looking struct {
	n      *Network
	l      *net.UnixListener
	server *exec.Cmd
	client *egress.Client

	mu      sync.Mutex
	refused []string
}

// lookerRole has the test binary look at names.
const lookerRole = "DSEC_TEST_LOOKER"

func TestMain(m *testing.M) {
	if os.Getenv(lookerRole) == "" {
		os.Exit(m.Run())
	}
	l, err := net.FileListener(os.NewFile(3, "socket"))
	if err == nil {
		err = egress.New(egress.Config{}).Run(l.(*net.UnixListener))
	}
	fmt.Fprintln(os.Stderr, "looker:", err)
	os.Exit(1)
}

func (k *looking) start(t *testing.T) {
	t.Helper()
	f, err := k.l.File()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	k.server = exec.Command("/proc/self/exe")
	k.server.Env = append(os.Environ(), lookerRole+"=1")
	k.server.ExtraFiles = []*os.File{f}
	k.server.Stderr = os.Stderr
	k.server.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 61442, Gid: 61442}}
	if err := k.n.InRouter(k.server.Start); err != nil {
		t.Fatal(err)
	}
}

// stop kills it.
func (k *looking) stop() {
	_ = k.server.Process.Kill()
	_ = k.server.Wait()
}

// agent begins to tell servers, as a process that has just started.
func (k *looking) agent(t *testing.T) {
	t.Helper()
	c, err := egress.Open(t.Context(), egress.Agent{Socket: k.l.Addr().String(), Router: k.n.router, Listen: k.n.NamesAt(), Conns: conns, Log: quiet(), Refused: func(r egress.Refusal) {
		k.mu.Lock()
		defer k.mu.Unlock()
		k.refused = append(k.refused, string(r.Sandbox)+": "+r.String())
	}})
	if err != nil {
		t.Fatal(err)
	}
	k.client = c
	if err := k.n.LookAt(c); err != nil {
		t.Fatal(err)
	}
}

func (k *looking) told(what string) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return strings.Contains(strings.Join(k.refused, "\n"), what)
}

func quiet() *slog.Logger { return slog.New(slog.NewTextHandler(io.Discard, nil)) }

func look(t *testing.T, n *Network) *looking {
	t.Helper()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(t.TempDir(), "s"), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	k := &looking{n: n, l: l}
	k.start(t)
	k.agent(t)
	t.Cleanup(func() {
		_ = k.client.Close()
		k.stop()
		_ = l.Close()
	})
	return k
}

// certificate is one for any name: who checks what is not tested here.
func certificate(t *testing.T) tls.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	x := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, x, x, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

// serveTLS says to which name it was spoken, then whatever it is told, until the end.
func serveTLS(t *testing.T, ns *os.File, addr string) {
	t.Helper()
	c := &tls.Config{Certificates: []tls.Certificate{certificate(t)}}
	accept(t, ns, addr, func(raw net.Conn) {
		s := tls.Server(raw, c)
		if s.Handshake() == nil {
			_, _ = fmt.Fprintln(s, s.ConnectionState().ServerName)
			_, _ = io.Copy(s, s)
			_ = s.CloseWrite()
		}
	})
}

// speak connects and returns a connection on which the server said the name.
func speak(ns *os.File, to string, c *tls.Config) (s *tls.Conn, err error) {
	c.InsecureSkipVerify = true
	err = inNamespace(ns, func() error {
		s, err = tls.DialWithDialer(&net.Dialer{Timeout: 2 * time.Second}, "tcp4", to, c)
		return err
	})
	if err != nil {
		return nil, err
	}
	b := make([]byte, 256)
	_ = s.SetDeadline(time.Now().Add(2 * time.Second))
	if n, err := s.Read(b); err != nil || string(b[:n]) != c.ServerName+"\n" {
		return nil, fmt.Errorf("the server says %q, %w", b[:n], err)
	}
	return s, s.SetDeadline(time.Time{})
}

// town is a network with names, and two public addresses.
func town(t *testing.T) (n *Network, k *looking, outside *os.File) {
	t.Helper()
	l := newLab(t)
	s := must(spaceIn(l.outside))(t)
	defer s.Close()
	if err := setAddress(s, "wan", netip.MustParseAddr(second), 24, ""); err != nil {
		t.Fatal(err)
	}
	serveTLS(t, l.outside, "0.0.0.0:443")
	answerNames(t, l.outside, map[string]string{"good.example.": public, "other.example.": public, "far.example.": second, "www.far.example.": second,
		"www.wild.example.": public, "xn--bcher-kva.example.": public})
	n = testNetwork(t, l, Config{Keeper: mapKeeper{}})
	k = look(t, n)
	t.Cleanup(resolve(t, n))
	return n, k, l.outside
}

const second = "203.0.113.3"

func asks(t *testing.T, n *Network, ns *os.File, names ...string) {
	t.Helper()
	for _, name := range names {
		if _, err := lookUp(t, n, ns, "udp", name); err != nil {
			t.Fatal(err)
		}
	}
}

func byName(of ...string) dsec.NetworkPolicy {
	var rules []dsec.NetworkRule
	for _, n := range of {
		rules = append(rules, dsec.NetworkRule{Domain: n})
	}
	return allow(rules...)
}

// TestF5_OnlyAllowedNamesAreSpokenTo: the name that is said must be open, and the
// address must have been handed out for it.
func TestF5_OnlyAllowedNamesAreSpokenTo(t *testing.T) {
	n, k, _ := town(t)
	ns, _ := attachPolicy(t, n, "a", byName("good.example", "*.wild.example", "bücher.example", "far.example"))
	asks(t, n, ns, "good.example.", "www.wild.example.", "xn--bcher-kva.example.", "far.example.")
	for _, name := range []string{"good.example", "GOOD.Example", "www.wild.example", "xn--bcher-kva.example"} {
		c, err := speak(ns, public+":443", &tls.Config{ServerName: name})
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		endsWell(t, c)
	}
	if c, err := speak(ns, second+":443", &tls.Config{ServerName: "far.example"}); err != nil {
		t.Error(err)
	} else {
		endsWell(t, c)
	}
	key, err := ecdh.X25519().GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	for what, c := range map[string]struct {
		to   string
		conf *tls.Config
		why  string
	}{
		"a name no rule opens":    {public, &tls.Config{ServerName: "other.example"}, "tls other.example at 203.0.113.2:443: it is no allowed name"},
		"a name below":            {public, &tls.Config{ServerName: "x.good.example"}, "it is no allowed name"},
		"the wildcard itself":     {public, &tls.Config{ServerName: "wild.example"}, "it is no allowed name"},
		"one that was not asked":  {public, &tls.Config{ServerName: "x.wild.example"}, "the address was not handed out for it"},
		"another name's address":  {second, &tls.Config{ServerName: "good.example"}, "tls good.example at 203.0.113.3:443: the address was not handed out for it"},
		"no name":                 {public, &tls.Config{ServerName: public}, "it says no name"},
		"ECH with an allowed one": {public, &tls.Config{ServerName: "hidden.example", MinVersion: tls.VersionTLS13, EncryptedClientHelloConfigList: echList(key.PublicKey().Bytes(), "good.example")}, "it encrypts the name (ECH)"},
	} {
		if _, err := speak(ns, c.to+":443", c.conf); err == nil || !strings.Contains(err.Error(), "access denied") {
			t.Errorf("%s: %v", what, err)
		}
		if !refusedRow(t, k, n, "a", c.why) {
			t.Errorf("%s: not counted as %q", what, c.why)
		}
	}
	eventually(t, "a refusal is told", func() bool { return k.told("a: tls ") })
	// A rule of addresses opens all that is there.
	change(t, n, "a", allow(dsec.NetworkRule{Domain: "good.example"}, dsec.NetworkRule{CIDR: public, Ports: []string{"443"}}), ns)
	if c, err := speak(ns, public+":443", &tls.Config{ServerName: "other.example"}); err != nil {
		t.Error(err)
	} else {
		// What was not looked at before does not go on when it is to be.
		change(t, n, "a", byName("good.example"), ns)
		dies(t, "a connection that was never looked at", c)
	}
}

// refusedRow looks for a reason in what is counted.
func refusedRow(t *testing.T, k *looking, n *Network, id dsec.SandboxID, why string) bool {
	t.Helper()
	rows, err := k.client.Rows(t.Context(), n.end(id).addr)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range rows {
		said := egress.Refusal{Name: r.Name, To: netip.AddrPortFrom(netip.MustParseAddr(r.Address), r.Port), Why: r.Refused}
		if r.Refused != "" && strings.Contains(said.String(), why) && r.Connections > 0 {
			return true
		}
	}
	return false
}

// endsWell says something, hears it, and ends well on both sides.
func endsWell(t *testing.T, c *tls.Conn) {
	t.Helper()
	defer func() { _ = c.Close() }()
	_ = c.SetDeadline(time.Now().Add(5 * time.Second))
	said := strings.Repeat("hello", 50_000)
	var wg sync.WaitGroup
	wg.Go(func() { _, _ = io.WriteString(c, said); _ = c.CloseWrite() })
	heard, err := io.ReadAll(c)
	wg.Wait()
	if err != nil || string(heard) != said {
		t.Errorf("heard %d bytes of %d, %v", len(heard), len(said), err)
	}
}

// dies within a second.
func dies(t *testing.T, what string, c *tls.Conn) {
	t.Helper()
	_ = c.SetDeadline(time.Now().Add(time.Second))
	if n, err := c.Read(make([]byte, 1)); err == nil || os.IsTimeout(err) {
		t.Errorf("%s: %d bytes, %v", what, n, err)
	}
}

func lives(t *testing.T, what string, c *tls.Conn) {
	t.Helper()
	_ = c.SetDeadline(time.Now().Add(5 * time.Second))
	_, err := c.Write([]byte("x"))
	if err == nil {
		_, err = io.ReadFull(c, make([]byte, 1))
	}
	if err != nil {
		t.Errorf("%s: %v", what, err)
	}
}

func echList(public []byte, name string) []byte {
	b := cryptobyte.NewBuilder(nil)
	b.AddUint16LengthPrefixed(func(b *cryptobyte.Builder) {
		b.AddUint16(0xfe0d)
		b.AddUint16LengthPrefixed(func(b *cryptobyte.Builder) {
			b.AddUint8(1)
			b.AddUint16(0x20)
			b.AddUint16LengthPrefixed(func(b *cryptobyte.Builder) { b.AddBytes(public) })
			b.AddUint16LengthPrefixed(func(b *cryptobyte.Builder) { b.AddUint16(1); b.AddUint16(1) })
			b.AddUint8(32)
			b.AddUint8LengthPrefixed(func(b *cryptobyte.Builder) { b.AddBytes([]byte(name)) })
			b.AddUint16(0)
		})
	})
	return b.BytesOrPanic()
}

// TestAChangeCutsOneNameOfAnAddress: of two names that share one, and only it.
func TestAChangeCutsOneNameOfAnAddress(t *testing.T) {
	n, _, _ := town(t)
	ns, _ := attachPolicy(t, n, "a", byName("good.example", "other.example"))
	neighbour, _ := attachPolicy(t, n, "b", byName("other.example"))
	asks(t, n, ns, "good.example.", "other.example.")
	asks(t, n, neighbour, "other.example.")
	stays := must(speak(ns, public+":443", &tls.Config{ServerName: "good.example"}))(t)
	goes := must(speak(ns, public+":443", &tls.Config{ServerName: "other.example"}))(t)
	theirs := must(speak(neighbour, public+":443", &tls.Config{ServerName: "other.example"}))(t)
	change(t, n, "a", byName("good.example"), ns)
	dies(t, "the name that is closed", goes)
	lives(t, "the other one", stays)
	lives(t, "a neighbour's", theirs)
	if _, err := speak(ns, public+":443", &tls.Config{ServerName: "other.example"}); err == nil {
		t.Error("a name that is closed is spoken to")
	}
	change(t, n, "a", dsec.NetworkPolicy{Mode: dsec.NetworkOpen}, ns)
	lives(t, "when everything is open", stays)
	change(t, n, "a", dsec.NetworkPolicy{}, ns)
	dies(t, "when nothing is", stays)
}

// TestNamesStayInForceWithoutTheAgent, which finds them again; and without who
// looks at them nothing passes.
func TestNamesStayInForceWithoutTheAgent(t *testing.T) {
	n, k, _ := town(t)
	ns, _ := attachPolicy(t, n, "a", byName("good.example", "far.example"))
	asks(t, n, ns, "good.example.")
	c := must(speak(ns, public+":443", &tls.Config{ServerName: "good.example"}))(t)
	if err := k.client.Close(); err != nil {
		t.Fatal(err)
	}
	lives(t, "without an agent", c)
	lives(t, "a new one without an agent", must(speak(ns, public+":443", &tls.Config{ServerName: "good.example"}))(t))
	if _, err := speak(ns, public+":443", &tls.Config{ServerName: "far.example"}); err == nil {
		t.Error("without an agent another name is spoken to")
	}
	// A new agent knows only what its node has written down.
	e := n.end("a")
	e.mu.Lock()
	e.pins = map[netip.Addr]*pin{}
	e.mu.Unlock()
	k.agent(t)
	if err := n.Restore(t.Context(), "a", byName("good.example", "far.example")); err != nil {
		t.Fatal(err)
	}
	lives(t, "with another agent", c)
	change(t, n, "a", byName("good.example", "x.example"), ns)
	lives(t, "after a change by another agent", c)
	rows, err := k.client.Rows(t.Context(), e.addr)
	if err != nil || len(rows) < 2 || rows[0].Name != "good.example" || rows[0].Connections != 2 || rows[0].BytesIn == 0 || rows[0].BytesOut == 0 {
		t.Errorf("%+v, %v", rows, err)
	}
	k.stop()
	dies(t, "without a server", c)
	if _, err := speak(ns, public+":443", &tls.Config{ServerName: "good.example"}); err == nil {
		t.Error("without a server a name is spoken to")
	}
	begun := time.Now()
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if _, err := n.Change(ctx, "a", byName("good.example"), ns); dsec.ClassOf(err) != dsec.Unavailable || time.Since(begun) > 5*time.Second {
		t.Errorf("a change without a server: %v after %v", err, time.Since(begun))
	}
	k.start(t)
	eventually(t, "another server has been told", func() bool {
		_, err := speak(ns, public+":443", &tls.Config{ServerName: "good.example"})
		return err == nil
	})
	if _, err := speak(ns, public+":443", &tls.Config{ServerName: "x.example"}); err == nil {
		t.Error("what the change that nobody acknowledged has closed is open")
	}
}

// TestF15_NothingIsLeftOfConnections that end early, say nothing, or say too much
// too slowly.
func TestF15_NothingIsLeftOfConnections(t *testing.T) {
	n, _, outside := town(t)
	ns, _ := attachPolicy(t, n, "a", byName("good.example"))
	asks(t, n, ns, "good.example.")
	begin := func() *net.TCPConn {
		var c net.Conn
		if err := inNamespace(ns, func() (err error) { c, err = net.DialTimeout("tcp4", public+":443", 2*time.Second); return err }); err != nil {
			t.Fatal(err)
		}
		return c.(*net.TCPConn)
	}
	for range 1000 {
		c := begin()
		if err := c.CloseWrite(); err != nil {
			t.Fatal(err)
		}
		_ = c.SetDeadline(time.Now().Add(5 * time.Second))
		if n, err := c.Read(make([]byte, 1)); err == nil || os.IsTimeout(err) {
			t.Fatalf("%d bytes, %v", n, err)
		}
		_ = c.Close()
	}
	for range 100 {
		endsWell(t, must(speak(ns, public+":443", &tls.Config{ServerName: "good.example"}))(t))
	}
	for what, ns := range map[string]*os.File{"the router": n.router, "the outside": outside} {
		eventually(t, what+" has no connection", func() bool { return connections(t, ns) == 0 })
	}
	// One byte after the other.
	c := slow{begin()}
	s := tls.Client(c, &tls.Config{ServerName: "good.example", InsecureSkipVerify: true})
	if err := s.Handshake(); err != nil {
		t.Error(err)
	}
	_ = s.Close()
	for _, said := range []string{"GET / HTTP/1.1\r\nHost: good.example\r\n\r\n", "SSH-2.0-x\r\n", "\x16\x03\x01\x00\x00"} {
		c := begin()
		_, _ = io.WriteString(c, said)
		_ = c.SetDeadline(time.Now().Add(2 * time.Second))
		if heard, err := io.ReadAll(c); os.IsTimeout(err) || len(heard) > 7 {
			t.Errorf("%q hears %q, %v", said, heard, err)
		}
		_ = c.Close()
	}
}

// slow says one byte at a time.
type slow struct{ *net.TCPConn }

func (s slow) Write(b []byte) (n int, err error) {
	for i := range b {
		if _, err := s.TCPConn.Write(b[i : i+1]); err != nil {
			return i, err
		}
	}
	return len(b), nil
}

// connections counts those of port 443 and of who looks at names that still take
// memory for more than to wait a while.
func connections(t *testing.T, ns *os.File) (count int) {
	t.Helper()
	err := inNamespace(ns, func() error {
		text, err := os.ReadFile("/proc/thread-self/net/tcp")
		for line := range strings.Lines(string(text)) {
			f := strings.Fields(line)
			if len(f) > 3 && strings.HasSuffix(f[0], ":") && f[3] != "0A" && f[3] != "06" { // listening, waiting
				count++
			}
		}
		return err
	})
	if err != nil && !errors.Is(err, unix.ENOENT) {
		t.Fatal(err)
	}
	return count
}

// TestWhoIsGoneHasNoConnections: they end with the sandbox, for the other side, too;
// who is there goes on.
func TestWhoIsGoneHasNoConnections(t *testing.T) {
	n, k, outside := town(t)
	gone, _ := attachPolicy(t, n, "gone", byName("good.example"))
	stays, _ := attachPolicy(t, n, "stays", byName("good.example"))
	asks(t, n, gone, "good.example.")
	asks(t, n, stays, "good.example.")
	c := must(speak(stays, public+":443", &tls.Config{ServerName: "good.example"}))(t)
	theirs := must(speak(gone, public+":443", &tls.Config{ServerName: "good.example"}))(t)
	before := connections(t, outside)
	// Its sockets go with its last process, the namespace with its descriptors.
	_ = theirs.NetConn().(*net.TCPConn).SetLinger(0)
	_ = theirs.NetConn().Close()
	_ = gone.Close()
	eventually(t, "nothing is left of the one that is gone", func() bool {
		return connections(t, outside) < before && len(k.client.Addresses()) == 1
	})
	lives(t, "the other one", c)
}

// TestASandboxHasItsShareOfPlaces, and others theirs.
func TestASandboxHasItsShareOfPlaces(t *testing.T) {
	n, k, _ := town(t)
	greedy, _ := attachPolicy(t, n, "a", byName("good.example"))
	neighbour, _ := attachPolicy(t, n, "b", byName("good.example"))
	asks(t, n, greedy, "good.example.")
	asks(t, n, neighbour, "good.example.")
	for range conns {
		stream(t, greedy, public+":443")
	}
	eventually(t, "one is too many", func() bool {
		_, _ = dial(greedy, "tcp4", public+":443")
		return refusedRow(t, k, n, "a", "too many connections at once")
	})
	lives(t, "a neighbour's", must(speak(neighbour, public+":443", &tls.Config{ServerName: "good.example"}))(t))
}

// conns is how many connections a sandbox may have in these tests.
const conns = 100

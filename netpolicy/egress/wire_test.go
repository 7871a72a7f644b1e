package egress

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/netpolicy"
)

var update = flag.Bool("update", false, "write golden files")

func examples() []any {
	a := netip.MustParseAddr("203.0.113.7")
	box := netip.MustParseAddr("100.96.0.18")
	return []any{
		request{Op: opGreet, Version: Version, Listen: netip.MustParseAddrPort("100.96.0.1:15443"), Conns: 4096},
		request{Op: opSet, Admitted: &netpolicy.Admitted{Sandbox: "sb-1", Address: box, Generation: 2,
			Names: []netpolicy.Name{{Name: "good.example", Open: []netpolicy.Ports{{Protocol: 6, First: 443, Last: 443}}}, {Name: "wild.example", Below: true, Open: []netpolicy.Ports{{Protocol: 6, First: 443, Last: 443}}}},
			Pins:  map[netip.Addr][]string{a: {"good.example", "www.wild.example"}}}},
		request{Op: opPin, Sandbox: box, Name: "good.example", Addresses: []netip.Addr{a}},
		request{Op: opForget, Sandbox: box, ID: "sb-1"}, request{Op: opAddresses}, request{Op: opGet, Sandbox: box}, request{Op: opAudit, Sandbox: box}, request{Op: opWatch},
		reply{}, reply{Class: dsec.NotFound, Error: "pin name good.example: no sandbox has 100.96.0.19"}, reply{Addresses: []netip.Addr{box}},
		reply{Rows: []dsec.EgressRow{{Name: "good.example", Address: "203.0.113.7", Port: 443, Connections: 2, BytesOut: 517, BytesIn: 4096, Last: time.Unix(1_700_000_000, 0).UTC()}}},
		reply{Refusal: &Refusal{Sandbox: "sb-1", Generation: 2, Name: "other.example", To: netip.AddrPortFrom(a, 443), Why: whyName, Refused: 3}},
	}
}

func TestFramesAreThoseOfTheFormat(t *testing.T) {
	var got bytes.Buffer
	for _, x := range examples() {
		b, err := encode(x)
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(&got, "%x %s\n", b[:4], b[4:])
	}
	const path = "testdata/frames.golden"
	if *update {
		if err := os.WriteFile(path, got.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil || got.String() != string(want) {
		t.Errorf("%v; frames are\n%swant\n%s", err, got.String(), want)
	}
}

func TestFramesComeBackAsTheyWere(t *testing.T) {
	for _, x := range examples() {
		b, err := encode(x)
		if err != nil {
			t.Fatal(err)
		}
		back := reflect.New(reflect.TypeOf(x))
		if err := read(bytes.NewReader(b), back.Interface()); err != nil || !reflect.DeepEqual(back.Elem().Interface(), x) {
			t.Errorf("%+v, %v, want %+v", back.Elem(), err, x)
		}
	}
}

// FuzzRequest: whatever comes is an error or within its bounds, and is the same
// again.
func FuzzRequest(f *testing.F) {
	for _, x := range examples() {
		b, err := encode(x)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Add([]byte{0xff, 0xff, 0xff, 0xff, '{'})
	f.Fuzz(func(t *testing.T, b []byte) {
		q, err := readRequest(bytes.NewReader(b))
		if err != nil {
			return
		}
		if q.Admitted != nil && valid(*q.Admitted) != nil || len(q.Addresses) > maxAddresses {
			t.Fatalf("%+v", q)
		}
		again, err := encode(q)
		if err != nil {
			t.Fatal(err)
		}
		if back, err := readRequest(bytes.NewReader(again)); err != nil || !reflect.DeepEqual(back, q) {
			t.Fatalf("%+v, %v, want %+v", back, err, q)
		}
	})
}

func TestTablesHaveBounds(t *testing.T) {
	box := netip.MustParseAddr("100.96.0.18")
	x := table{box: {Sandbox: "a", Address: box}}
	addr := netip.MustParseAddr("203.0.113.0")
	for i := range netpolicy.MaxNames + 3 {
		if err := x.pin(box, fmt.Sprint("n", i), []netip.Addr{addr}); err != nil {
			t.Fatal(err)
		}
	}
	if n := x[box].Pins[addr]; len(n) != netpolicy.MaxNames || n[0] != "n3" {
		t.Errorf("%d names, the first is %s", len(n), n[0])
	}
	var err error
	for i := 0; err == nil && i < 10*maxAddresses; i++ {
		addr = addr.Next()
		before := x[box]
		if err = x.pin(box, "x", []netip.Addr{addr}); err != nil && x[box] != before {
			t.Error("what was refused is there")
		}
	}
	if dsec.ClassOf(err) != dsec.ResourceExhausted || len(x[box].Pins) != maxAddresses {
		t.Errorf("%d addresses, %v", len(x[box].Pins), err)
	}
	if err := x.pin(addr, "x", nil); !errors.Is(err, dsec.NotFound.Err()) {
		t.Errorf("nobody's: %v", err)
	}
}

// TestRefusalsDoNotHideWhatWasReached: names are made up by who is counted.
func TestRefusalsDoNotHideWhatWasReached(t *testing.T) {
	a := audit{rows: map[key]*row{}}
	to := netip.MustParseAddrPort("203.0.113.7:443")
	for i := range 10 * maxRefused {
		a.row(key{name: strings.Repeat("x", i%200) + fmt.Sprint(i), to: to, refused: whyName}).conns.Add(1)
	}
	r := a.row(key{name: "good.example", to: to})
	r.conns.Add(1)
	r.used()
	all := a.list()
	if len(all) != maxRefused+2 || all[0].Name != "good.example" || all[0].Connections != 1 {
		t.Errorf("%d rows, the first is %+v", len(all), all[0])
	}
	var count int64
	for _, r := range all[1:] {
		if count += r.Connections; r.Address == "" && r.Connections != 9*maxRefused {
			t.Errorf("the others are %+v", r)
		}
	}
	if count != 10*maxRefused {
		t.Errorf("%d refusals counted", count)
	}
}

// TestAnAddressIsOfOneSandbox, the last that was told to have it, and a sandbox has
// one address; who is forgotten is that one only.
func TestAnAddressIsOfOneSandbox(t *testing.T) {
	s := New(Config{Places: 1})
	defer func() { _ = s.Close() }()
	a, b := netip.MustParseAddr("100.96.0.18"), netip.MustParseAddr("100.96.0.19")
	is := func(a netip.Addr, want dsec.SandboxID) {
		t.Helper()
		if id, ok := s.Sandbox(a); id != want || ok != (want != "") {
			t.Errorf("%s is of %q, want %q", a, id, want)
		}
	}
	s.set(netpolicy.Admitted{Sandbox: "one", Address: a})
	s.mu.Lock()
	s.boxes[a].audit.row(key{name: "good.example"}).conns.Add(7)
	s.mu.Unlock()
	s.set(netpolicy.Admitted{Sandbox: "one", Address: b})
	is(a, "")
	is(b, "one")
	r, err := s.answer(request{Op: opAudit, Sandbox: b})
	if err != nil || len(r.Rows) != 1 || r.Rows[0].Connections != 7 {
		t.Errorf("what was counted before: %+v, %v", r.Rows, err)
	}
	s.set(netpolicy.Admitted{Sandbox: "two", Address: b})
	s.forget(b, "one")
	is(b, "two")
	s.forget(b, "two")
	is(b, "")
	if _, err := s.answer(request{Op: "nothing"}); dsec.ClassOf(err) != dsec.Invalid {
		t.Error(err)
	}
}

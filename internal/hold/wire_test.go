package hold

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/process"
)

func wirePair(t *testing.T) (a, b *wire) {
	t.Helper()
	x, y, err := seqpacketPair()
	must(t, err)
	cx, err := unixConn(x)
	must(t, err)
	cy, err := unixConn(y)
	must(t, err)
	t.Cleanup(func() { _ = cx.Close(); _ = cy.Close() })
	return newWire(cx), newWire(cy)
}

func TestFramesCarryBodiesAndDescriptors(t *testing.T) {
	a, b := wirePair(t)
	for _, size := range []int{0, 1, maxInline, maxInline + 1, 5 << 20} {
		f, err := os.Open(os.DevNull)
		must(t, err)
		body := bytes.Repeat([]byte("x"), size)
		must(t, a.send(frame{op: opExec, id: 7, flags: flagError, body: body, files: []*os.File{f, f}}))
		got, err := b.recv()
		must(t, err)
		if got.op != opExec || got.id != 7 || got.flags&flagError == 0 || !bytes.Equal(got.body, body) || len(got.files) != 2 {
			t.Fatalf("%d: %+v", size, got.files)
		}
		got.close()
		must(t, f.Close())
	}
}

func TestOtherVersionIsRefused(t *testing.T) {
	b := make([]byte, frameHeader)
	binary.LittleEndian.PutUint16(b, frameMagic)
	binary.LittleEndian.PutUint16(b[2:], protocolVersion+1)
	for o := range opEvent {
		binary.LittleEndian.PutUint16(b[4:], uint16(o))
		var f frame
		err := f.parse(b)
		if o == opHello || o == opUpgrade {
			must(t, err)
		} else if err == nil || !strings.Contains(err.Error(), fmt.Sprint("version ", protocolVersion+1)) {
			t.Fatal(o, err)
		}
	}
}

func TestSpecKeepsItsBytes(t *testing.T) {
	s := process.Spec{ID: "a", Argv: []string{"\xff\xfe", "ü", "\x00b64:", ""}, Env: map[string]string{"B\xff": "1", "A": "\xfe"}, Cwd: "/\x80", PTY: &process.Size{Rows: 1, Cols: 2}}
	b, err := json.Marshal(toWireSpec(s))
	must(t, err)
	var w wireSpec
	must(t, json.Unmarshal(b, &w))
	got := w.spec()
	if got.Argv[0] != s.Argv[0] || got.Argv[2] != s.Argv[2] || got.Env["B\xff"] != "1" || got.Env["A"] != "\xfe" || got.Cwd != s.Cwd || *got.PTY != *s.PTY {
		t.Fatalf("%+v", got)
	}
	if !w.equal(toWireSpec(s)) {
		t.Fatal("a round trip changed it")
	}
}

func TestErrorsKeepTheirClass(t *testing.T) {
	err := decodeError(encodeError(dsec.E(dsec.FileNotFound, "exec", "x", errors.New("no such file"))))
	if dsec.ClassOf(err) != dsec.FileNotFound || err.Error() != "exec x: no such file" {
		t.Fatal(err)
	}
}

func FuzzFrame(f *testing.F) {
	good := make([]byte, frameHeader+2)
	binary.LittleEndian.PutUint16(good, frameMagic)
	binary.LittleEndian.PutUint16(good[2:], protocolVersion)
	binary.LittleEndian.PutUint32(good[12:], 2)
	copy(good[frameHeader:], "{}")
	f.Add(good)
	f.Fuzz(func(t *testing.T, b []byte) {
		var f frame
		if err := f.parse(b); err == nil && len(f.body) != len(b)-frameHeader {
			t.Fatal(len(f.body), len(b))
		}
	})
}

func FuzzProgress(f *testing.F) {
	f.Add(encodeProgress(process.Progress{Total: 5, Start: 1 << 20, EOF: true, Inline: []byte("hello")}))
	f.Fuzz(func(t *testing.T, b []byte) {
		p, err := decodeProgress(b)
		if err == nil && len(p.Inline) != len(b)-progressSize {
			t.Fatal(p)
		}
	})
}

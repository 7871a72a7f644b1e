package runtimetest

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"github.com/opendsec/dsec/process"
)

var outputCases = []suiteCase{
	{"A13_re-attach from offset 0", testReattach},
	{"C1_bytes split over chunks", testSplit},
	{"C3_output bytes are exact", testExact},
	{"C5_endless output is bounded", testFlood},
	{"C6_on_limit", testOnLimit},
	{"streamed output is complete while the reader keeps up", testStream},
	{"a reader that left slows nothing", testReaderLeft},
	{"a terminal", testTerminal},
}

func testReattach(t *testing.T, e *Env) {
	id := e.create(t, nil)
	p := e.start(t, id, process.Spec{Argv: []string{"/bin/sh", "-c", "seq 1 1000; sleep 1; seq 1001 2000"}})
	r, err := p.Follow(t.Context(), process.Stdout, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.Next(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	wait(t, p)
	out := follow(t, p, process.Stdout, 0)
	if n := bytes.Count(out, []byte("\n")); n != 2000 || !bytes.HasPrefix(out, []byte("1\n2\n")) || !bytes.HasSuffix(out, []byte("1999\n2000\n")) {
		t.Fatalf("%d lines, ends %q", n, out[max(0, len(out)-20):])
	}
	if tail := follow(t, p, process.Stdout, int64(len(out)-5)); string(tail) != "2000\n" {
		t.Fatalf("from near the end: %q", tail)
	}
}

func testSplit(t *testing.T, e *Env) {
	id := e.create(t, nil)
	p := e.start(t, id, process.Spec{Argv: []string{"/bin/sh", "-c", `printf '\344\270'; sleep .4; printf '\255\n'`}})
	if out := follow(t, p, process.Stdout, 0); string(out) != "中\n" {
		t.Fatalf("%q", out)
	}
}

func testExact(t *testing.T, e *Env) {
	id := e.create(t, nil)
	if _, out := e.sh(t, id, `printf 'a\n\nb\n\n\nc\n'`); out != "a\n\nb\n\n\nc\n" {
		t.Fatalf("%q", out)
	}
	if _, out := e.sh(t, id, `printf '\000\001\377'`); out != "\x00\x01\xff" {
		t.Fatalf("%q", out)
	}
}

func testFlood(t *testing.T, e *Env) {
	id := e.create(t, nil)
	p := e.start(t, id, process.Spec{Argv: []string{"yes"}, Timeout: time.Second, Head: 64 << 10, Tail: 64 << 10})
	r := wait(t, p)
	head, tail, off, err := p.Kept(t.Context(), process.Stdout)
	if err != nil {
		t.Fatal(err)
	}
	if r.Status != process.TimedOut || !r.Stdout.Truncated || r.Stdout.Total < 1<<20 {
		t.Fatalf("%+v", r)
	}
	if len(head) != 64<<10 || len(tail) == 0 || len(tail) > 64<<10 || off+int64(len(tail)) != r.Stdout.Total {
		t.Fatalf("head %d, tail %d from %d of %d", len(head), len(tail), off, r.Stdout.Total)
	}
	if r.Stdout.Dropped != r.Stdout.Total-int64(len(head)+len(tail)) {
		t.Fatalf("dropped %d of %d, kept %d", r.Stdout.Dropped, r.Stdout.Total, len(head)+len(tail))
	}
}

func testOnLimit(t *testing.T, e *Env) {
	id := e.create(t, nil)
	s := process.Spec{Argv: []string{"/bin/sh", "-c", "head -c 1000000 /dev/zero; echo end >&2"}, Head: 64 << 10, Tail: 64 << 10}
	p := e.start(t, id, s)
	if r := wait(t, p); r.Status != process.Exited || r.ExitCode != 0 || !r.Stdout.Truncated || r.Stdout.Total != 1000000 {
		t.Fatalf("truncate: %+v", r)
	}
	s.OnLimit = process.Kill
	p = e.start(t, id, s)
	r := wait(t, p)
	head, _, _, err := p.Kept(t.Context(), process.Stdout)
	if err != nil || r.Status != process.OutputLimit || len(head) != 64<<10 {
		t.Fatalf("kill: %+v, %d kept, %v", r, len(head), err)
	}
}

func testStream(t *testing.T, e *Env) {
	id := e.create(t, nil)
	p := e.start(t, id, process.Spec{Argv: []string{"/bin/sh", "-c", "sleep .3; head -c 8000000 /dev/zero"}, Head: 4 << 10, Tail: 256 << 10})
	if out := follow(t, p, process.Stdout, 0); len(out) != 8000000 {
		t.Fatalf("%d bytes came", len(out))
	}
	if r := wait(t, p); r.Stdout.Total != 8000000 || r.Stdout.Dropped != 0 {
		t.Fatalf("%+v", r)
	}
}

func testReaderLeft(t *testing.T, e *Env) {
	id := e.create(t, nil)
	p := e.start(t, id, process.Spec{Argv: []string{"/bin/sh", "-c", "sleep .3; head -c 8000000 /dev/zero"}, Head: 4 << 10, Tail: 64 << 10})
	r, err := p.Follow(t.Context(), process.Stdout, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	if r := wait(t, p); r.ExitCode != 0 || r.Stdout.Total != 8000000 {
		t.Fatalf("%+v", r)
	}
}

func testTerminal(t *testing.T, e *Env) {
	id := e.create(t, nil)
	p := e.start(t, id, process.Spec{Argv: []string{"/bin/sh", "-c", "echo hi"}, PTY: &process.Size{Rows: 24, Cols: 80}})
	if err := p.Resize(t.Context(), process.Size{Rows: 50, Cols: 132}); err != nil && !p.Spec().Stdin {
		t.Logf("resize raced with the end: %v", err)
	}
	if r := wait(t, p); r.ExitCode != 0 {
		t.Fatalf("%+v", r)
	}
	if out := kept(t, p, process.Stdout); strings.TrimSpace(out) != "hi" || !strings.HasSuffix(out, "\r\n") {
		t.Fatalf("%q", out)
	}
	q := e.start(t, id, process.Spec{Argv: []string{"sleep", "300"}})
	if err := q.Resize(t.Context(), process.Size{Rows: 1, Cols: 1}); err == nil {
		t.Fatal("resize without a terminal succeeded")
	}
}

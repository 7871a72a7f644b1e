package gateway_test

import (
	"io"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/files"
	"github.com/opendsec/dsec/process"
)

// benchEnv is a cluster of one with a sandbox of the fake tier: what is
// measured is the way there and back.
func benchEnv(b *testing.B) (*client.Client, dsec.SandboxID) {
	b.Helper()
	n := newThinNode()
	b.Cleanup(func() { _ = n.rt.Close() })
	e := (&env{t: b, node: n, service: n}).start()
	c := e.local()
	return c, e.sandbox(c).ID
}

func BenchmarkGet(b *testing.B) {
	c, id := benchEnv(b)
	for b.Loop() {
		if _, err := c.Get(b.Context(), id); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkExecInSession(b *testing.B) {
	c, id := benchEnv(b)
	s, err := c.OpenSession(b.Context(), nil, nil)
	must(b, err)
	defer s.Close()
	for b.Loop() {
		r, err := s.Exec(b.Context(), id, process.Spec{Argv: []string{"true"}}, client.ModeKept, nil)
		if err != nil {
			b.Fatal(err)
		}
		if _, err := r.Wait(b.Context()); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkStreamedOutput(b *testing.B) {
	c, id := benchEnv(b)
	const size = 64 << 20
	b.SetBytes(size)
	for b.Loop() {
		if _, err := c.Run(b.Context(), id, sh("head -c 67108864 /dev/zero"), io.Discard, nil); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkUpload(b *testing.B) {
	c, id := benchEnv(b)
	const size = 16 << 20
	b.SetBytes(size)
	for b.Loop() {
		if _, err := c.Files(id, "").Write(b.Context(), "/tmp/f", io.LimitReader(zeros{}, size), files.WriteOptions{}); err != nil {
			b.Fatal(err)
		}
	}
}

package runtimetest

import (
	"io"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/image"
	"github.com/opendsec/dsec/image/erofs"
	"github.com/opendsec/dsec/runtime"
)

func testPack(t *testing.T, e *Env) {
	p := ability[runtime.Packer](t, e)
	id := e.create(t, nil)
	if r, _ := e.sh(t, id, "mkdir /root/d; echo new > /root/d/f; rm /etc/group"); r.ExitCode != 0 {
		t.Fatalf("%+v", r)
	}
	holds := func(when string) {
		t.Helper()
		im := packedBy(t, p, id)
		if got := contentsIn(t, im, "root/d/f"); got != "new\n" {
			t.Errorf("%s: the new file: %q", when, got)
		}
		if n := lookIn(t, im, "etc/group"); n == nil || !n.IsWhiteout() {
			t.Errorf("%s: no whiteout", when)
		}
		if n := lookIn(t, im, "etc/passwd"); n != nil {
			t.Errorf("%s: an unchanged file is in it", when)
		}
		c, err := p.Changes(t.Context(), id, 100)
		if err != nil {
			t.Fatal(err)
		}
		for _, want := range []string{"A /root/d/", "A /root/d/f", "D /etc/group"} {
			if !slices.ContainsFunc(c.List, func(c dsec.Change) bool { return string(c.Kind)+" "+c.Path == want }) {
				t.Errorf("%s: no %s in %+v", when, want, c.List)
			}
		}
	}
	holds("running")
	if r, _ := e.sh(t, id, "cat /root/d/f"); r.ExitCode != 0 {
		t.Fatalf("it does not go on: %+v", r)
	}
	if ps, ok := e.Runtime.(runtime.Pauser); ok {
		if err := ps.Pause(t.Context(), id); err != nil {
			t.Fatal(err)
		}
		holds("paused")
		if list, err := e.Runtime.List(t.Context()); err != nil || !slices.ContainsFunc(list, func(s runtime.Status) bool { return s.ID == id && s.Paused }) {
			t.Errorf("it is not paused any more: %+v %v", list, err)
		}
	}
	if err := e.Runtime.Stop(t.Context(), id, 0); err != nil {
		t.Fatal(err)
	}
	holds("stopped")
	_, err := p.Pack(t.Context(), dsec.NewSandboxID("none"), image.Files{}, dsec.Scrub{})
	wantClass(t, err, "", dsec.NotFound)
}

// packedBy packs a sandbox and reads the layer back.
func packedBy(t *testing.T, p runtime.Packer, id dsec.SandboxID) *erofs.Image {
	t.Helper()
	var f image.Files
	for _, to := range []**os.File{&f.Meta, &f.Data} {
		var err error
		if *to, err = os.CreateTemp(t.TempDir(), ""); err != nil {
			t.Fatal(err)
		}
		file := *to
		t.Cleanup(func() { file.Close() })
	}
	got, err := p.Pack(t.Context(), id, f, dsec.Scrub{})
	if err != nil {
		t.Fatal(err)
	}
	im, err := erofs.Open(f.Meta, got.MetaSize, f.Data)
	if err == nil {
		err = im.Check()
	}
	if err != nil {
		t.Fatal(err)
	}
	return im
}

func lookIn(t *testing.T, im *erofs.Image, name string) *erofs.Node {
	t.Helper()
	n, err := im.Root()
	for part := range strings.SplitSeq(name, "/") {
		if err != nil {
			t.Fatal(err)
		}
		if n == nil || n.Mode&erofs.TypeMask != erofs.TypeDir {
			return nil
		}
		n, err = n.Lookup(part)
	}
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func contentsIn(t *testing.T, im *erofs.Image, name string) string {
	t.Helper()
	n := lookIn(t, im, name)
	if n == nil {
		return "(none)"
	}
	r, err := n.Contents()
	if err != nil {
		t.Fatal(err)
	}
	b, err := io.ReadAll(r)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

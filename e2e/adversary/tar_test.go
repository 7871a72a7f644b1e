package adversary

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/files"
)

// hostileTars are what a sandbox sends when it is downloaded from, and what a
// client sends that means the machine.
func hostileTars(t *testing.T, b bait) map[string][]byte {
	up := strings.Repeat("../", 30)
	reg := func(name string) tar.Header { return tar.Header{Name: name, Mode: 0o6777, Typeflag: tar.TypeReg} }
	link := func(name, to string) tar.Header {
		return tar.Header{Name: name, Linkname: to, Typeflag: tar.TypeSymlink}
	}
	hard := func(name, to string) tar.Header { return tar.Header{Name: name, Linkname: to, Typeflag: tar.TypeLink} }
	return map[string][]byte{
		"upwards":           tarOf(t, reg(up+b.dir[1:]+"/new")),
		"absolute":          tarOf(t, reg(b.path("new"))),
		"through a link":    tarOf(t, link("d", b.dir), reg("d/new")),
		"through upwards":   tarOf(t, link("d", up+b.dir[1:]), reg("d/file")),
		"through two":       tarOf(t, link("d", "e"), link("e", b.dir), reg("d/file")),
		"through magic":     tarOf(t, link("d", "/proc/self/root"+b.dir), reg("d/file")),
		"hard link out":     tarOf(t, hard("h", b.path("file")), reg("h")),
		"hard link up":      tarOf(t, hard("h", up+b.path("file")[1:]), reg("h")),
		"link replaced":     tarOf(t, link("file", b.path("file")), reg("file")),
		"directory to link": tarOf(t, tar.Header{Name: "d/", Mode: 0o755, Typeflag: tar.TypeDir}, link("d", b.dir), reg("d/new")),
		"device":            tarOf(t, tar.Header{Name: "disk", Mode: 0o666, Typeflag: tar.TypeBlock, Devmajor: 7}, reg("disk")),
		"fifo":              tarOf(t, tar.Header{Name: "pipe", Mode: 0o666, Typeflag: tar.TypeFifo}, reg("pipe")),
		"nobody's number":   tarOf(t, tar.Header{Name: "n", Mode: 0o6777, Typeflag: tar.TypeReg, Uid: 70000, Gid: 70000, Format: tar.FormatPAX}),
		"number of keep":    tarOf(t, tar.Header{Name: "n", Mode: 0o6777, Typeflag: tar.TypeReg, Uid: 1<<32 - 1, Gid: 1<<32 - 1, Format: tar.FormatPAX}),
		"dot dot inside":    tarOf(t, reg("a/../../"+up+b.dir[1:]+"/new")),
	}
}

// hostileTarsStayInsideTheSandbox unpacks each through the whole platform.
func hostileTarsStayInsideTheSandbox(t *testing.T, h *host) {
	b := setBait(t)
	id := h.create(t, nil)
	for name, text := range hostileTars(t, b) {
		for _, user := range []string{"", "user"} {
			err := h.Files(id, user).Upload(t.Context(), "/tmp/"+strings.ReplaceAll(name, " ", "-")+user, bytes.NewReader(text), files.TreeOptions{})
			if c := dsec.ClassOf(err); err != nil && (c == dsec.Internal || c == dsec.Unavailable) {
				t.Errorf("%s as %q: %v", name, user, err)
			}
		}
		b.untouched(t)
	}
	if got := h.sh(t, id, "echo lives"); got != "lives\n" {
		t.Errorf("the sandbox says %q", got)
	}
}

// whatASandboxSendsStaysBelow: what the client copies out of a sandbox, which is
// the adversary's, stays below the directory it is copied to.
func whatASandboxSendsStaysBelow(t *testing.T, h *host) {
	b := setBait(t)
	id := h.create(t, nil)
	h.sh(t, id, `cd /tmp; mkdir out; cd out; ln -s `+b.dir+` d; ln -s `+b.path("file")+` file; mkfifo pipe 2>/dev/null
		mkdir "$(printf 'x\033[2J')"; echo x >"$(printf 'new\nline')"; ln -s / root; ln -s . loop; mkdir deep; cd deep; ln -s ../../../../../.. up`)
	to := filepath.Join(t.TempDir(), "copy")
	cmd := h.cli(t, "cp", string(id)+":/tmp/out", to)
	if bytes.ContainsAny(cmd, "\x1b") {
		t.Errorf("what was said: %q", cmd)
	}
	b.untouched(t)
	if to, err := os.Readlink(filepath.Join(to, "d")); err == nil && to != b.dir {
		t.Errorf("the link became %s", to)
	}
	// Again, over what is there now: links in the way lead nowhere.
	h.sh(t, id, "cd /tmp/out; rm d file; mkdir d; echo hostile >d/new; echo hostile >file")
	h.cli(t, "cp", string(id)+":/tmp/out", to)
	b.untouched(t)
	endless(t, h, id)
}

// endless: a file that grows as it is read, and one that seems to have exabytes, are
// bounded by what the reader asked for.
func endless(t *testing.T, h *host, id dsec.SandboxID) {
	t.Helper()
	h.try(t, id, "root", "sparse-file", nil)
	f := h.Files(id, "")
	err := f.Download(t.Context(), "/tmp", io.Discard, files.TreeOptions{Max: 1 << 20, Globs: []string{"sparse"}})
	if err != nil && dsec.ClassOf(err) != dsec.ResourceExhausted {
		t.Errorf("download of a sparse file: %v", err)
	}
	p := h.background(t, id, "/bin/sh", "-c", "while true; do echo more; done >/tmp/growing")
	stop := errors.New("enough")
	if _, err := f.Read(t.Context(), "/tmp/growing", 0, 1<<16, &atMost{1 << 16, stop}); err != nil && errors.Is(err, stop) {
		t.Error("more came than was asked for")
	}
	if _, err := p.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
}

type atMost struct {
	left int
	err  error
}

func (a *atMost) Write(p []byte) (int, error) {
	if a.left -= len(p); a.left < 0 {
		return 0, a.err
	}
	return len(p), nil
}

// hostileLayersReachNothing: layers of images are read by the node before anybody
// looks at them.
func hostileLayersReachNothing(t *testing.T, h *host) {
	b := setBait(t)
	for name, text := range hostileTars(t, b) {
		_, err := h.UploadTree(t.Context(), bytes.NewReader(text), client.BuildOptions{Tag: "bad", At: "/x"})
		if c := dsec.ClassOf(err); err != nil && c != dsec.Invalid && c != dsec.Unsupported {
			t.Errorf("%s: %v", name, err)
		}
		b.untouched(t)
		if err != nil {
			continue
		}
		id := h.create(t, func(s *dsec.Spec) { s.Layers = []dsec.LayerRef{"bad"} })
		if got := h.sh(t, id, "cat /x/file /x/h /x/d/file 2>/dev/null; echo lives"); strings.Contains(got, secret) || !strings.HasSuffix(got, "lives\n") {
			t.Errorf("%s shows %q", name, got)
		}
		if _, err := h.Delete(t.Context(), id); err != nil {
			t.Error(err)
		}
	}
}

package runtimetest

import (
	"archive/tar"
	"bytes"
	"io"
	"strings"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/files"
	"github.com/opendsec/dsec/runtime"
)

func (e *Env) files(t *testing.T, id dsec.SandboxID, user string) files.FS {
	t.Helper()
	fs, err := ability[runtime.Filer](t, e).Files(t.Context(), id, user)
	if err != nil {
		t.Fatalf("files as %q: %v", user, err)
	}
	return fs
}

func testFiles(t *testing.T, e *Env) {
	id := e.create(t, nil)
	fs := e.files(t, id, "root")
	content := strings.Repeat("0123456789", 20000)
	mode, uid := uint32(0o600), uint32(1000)
	i, err := fs.Write(t.Context(), "/data/a/b/some file", strings.NewReader(content), files.WriteOptions{Parents: true, Mode: &mode, UID: &uid})
	if err != nil || i.Size != int64(len(content)) || i.Mode != 0o600 || i.UID != 1000 {
		t.Fatalf("write: %+v %v", i, err)
	}
	var b bytes.Buffer
	if n, err := fs.Read(t.Context(), "/data/a/b/some file", 5, 10, &b); n != 10 || err != nil || b.String() != "5678901234" {
		t.Fatalf("range: %d %q %v", n, b.String(), err)
	}
	if i, err := fs.Stat(t.Context(), "/data/a", true); err != nil || i.Kind != files.Dir || i.UID != 1000 {
		t.Fatalf("D3: parent %+v %v", i, err)
	}
	if r, out := e.sh(t, id, "cat '/data/a/b/some file' | wc -c"); strings.TrimSpace(out) != "200000" {
		t.Fatalf("a command sees %q %+v", out, r)
	}
	if err := fs.Move(t.Context(), "/data/a/b/some file", "/data/moved"); err != nil {
		t.Fatal(err)
	}
	if err := fs.Mkdir(t.Context(), "/data/d", 0o755, false); err != nil {
		t.Fatal(err)
	}
	list, err := fs.List(t.Context(), "/data", 1)
	if err != nil || len(list) != 3 || list[0].Path != "/data/a" || list[1].Path != "/data/d" || list[2].Path != "/data/moved" {
		t.Fatalf("list: %+v %v", list, err)
	}
	if err := fs.Remove(t.Context(), "/data", true); err != nil {
		t.Fatal(err)
	}
	_, err = fs.Stat(t.Context(), "/data", false)
	wantClass(t, err, "/data", dsec.FileNotFound)
	testTree(t, fs)
}

func testTree(t *testing.T, fs files.FS) {
	var up bytes.Buffer
	tw := tar.NewWriter(&up)
	for _, h := range []*tar.Header{{Name: "dir/", Typeflag: tar.TypeDir, Mode: 0o755}, {Name: "dir/file", Typeflag: tar.TypeReg, Mode: 0o640, Size: 3},
		{Name: "dir/link", Typeflag: tar.TypeSymlink, Linkname: "nowhere"}} {
		if err := tw.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if h.Size > 0 {
			_, _ = io.WriteString(tw, "abc") // to memory
		}
	}
	_ = tw.Close() // to memory
	if err := fs.Upload(t.Context(), "/tree", &up, files.TreeOptions{}); err != nil {
		t.Fatal(err)
	}
	var down bytes.Buffer
	if err := fs.Download(t.Context(), "/tree", &down, files.TreeOptions{}); err != nil {
		t.Fatal(err)
	}
	got := map[string]string{}
	tr := tar.NewReader(&down)
	for {
		h, err := tr.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		text, _ := io.ReadAll(tr)
		got[strings.Trim(strings.TrimPrefix(h.Name, "./"), "/")] = h.Linkname + string(text)
	}
	if got["dir/file"] != "abc" || got["dir/link"] != "nowhere" {
		t.Fatalf("downloaded %q", got)
	}
	var bad bytes.Buffer
	tw = tar.NewWriter(&bad)
	_ = tw.WriteHeader(&tar.Header{Name: "../out", Typeflag: tar.TypeReg}) // to memory
	_ = tw.Close()
	wantClass(t, fs.Upload(t.Context(), "/tree", &bad, files.TreeOptions{}), "out", dsec.Invalid)
}

func testFileErrors(t *testing.T, e *Env) {
	id := e.create(t, nil)
	root, user := e.files(t, id, "root"), e.files(t, id, "user")
	_, err := root.Read(t.Context(), "/etc", 0, -1, io.Discard)
	wantClass(t, err, "/etc", dsec.IsADirectory)
	_, err = root.Write(t.Context(), "/etc", strings.NewReader("x"), files.WriteOptions{})
	wantClass(t, err, "/etc", dsec.IsADirectory)
	_, err = root.Read(t.Context(), "/https:/x/…%C5%82", 0, -1, io.Discard)
	wantClass(t, err, "%C5%82", dsec.FileNotFound)
	_, err = root.Read(t.Context(), "/etc/passwd/x", 0, -1, io.Discard)
	wantClass(t, err, "/etc/passwd/x", dsec.NotADirectory)
	mode := uint32(0)
	if _, err := root.Write(t.Context(), "/tmp/secret", strings.NewReader("x"), files.WriteOptions{Mode: &mode}); err != nil {
		t.Fatal(err)
	}
	_, err = user.Read(t.Context(), "/tmp/secret", 0, -1, io.Discard)
	wantClass(t, err, "/tmp/secret", dsec.PermissionDenied)
	_, err = user.Write(t.Context(), "/etc/passwd", strings.NewReader("x"), files.WriteOptions{})
	wantClass(t, err, "/etc/passwd", dsec.PermissionDenied)
	if _, err := root.Write(t.Context(), "/tmp/empty", strings.NewReader(""), files.WriteOptions{}); err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	if n, err := root.Read(t.Context(), "/tmp/empty", 0, -1, &b); n != 0 || err != nil {
		t.Fatalf("empty file: %d %v", n, err)
	}
	wantClass(t, root.Mkdir(t.Context(), "/tmp", 0o755, false), "/tmp", dsec.FileExists)
	_, err = root.List(t.Context(), "/etc/passwd", 1)
	wantClass(t, err, "/etc/passwd", dsec.NotADirectory)
	_, err = ability[runtime.Filer](t, e).Files(t.Context(), id, "nonexistent")
	wantClass(t, err, "nonexistent", dsec.Invalid, dsec.NotFound)
	_, err = root.Write(t.Context(), "/tmp/sum", strings.NewReader("x"), files.WriteOptions{SHA256: strings.Repeat("0", 64)})
	wantClass(t, err, "/tmp/sum", dsec.Corrupt)
	if err := e.Runtime.Destroy(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	_, err = root.Stat(t.Context(), "/etc", true)
	wantClass(t, err, "", dsec.SandboxGone)
}

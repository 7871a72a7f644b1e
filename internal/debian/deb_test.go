package debian

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ulikunitz/xz"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/debian/debiantest"
)

func everything(string) bool { return true }

// read returns the files of a package.
func read(deb []byte, lim Limits, want func(string) bool) (map[string]string, error) {
	got := map[string]string{}
	err := EachFile(bytes.NewReader(deb), "tool", lim, want, func(name string, _ int64, r io.Reader) error {
		b, err := io.ReadAll(r)
		got[name] = string(b)
		return err
	})
	return got, err
}

func TestFilesOfAPackage(t *testing.T) {
	files := []debiantest.File{{Name: "./", Type: tar.TypeDir}, {Name: "./a/", Type: tar.TypeDir}, {Name: "./a/one", Content: []byte("1")},
		{Name: "./a/two", Content: []byte("22")}, {Name: "./a/link", Type: tar.TypeSymlink, Link: "/etc/passwd"}}
	for _, suffix := range []string{"", ".gz", ".xz", ".zst"} {
		got, err := read(debiantest.Deb(t, suffix, files...), Limits{}, func(n string) bool { return n != "a/link" && n != "a/one" })
		if err != nil || len(got) != 1 || got["a/two"] != "22" {
			t.Errorf("%s: %v %v", suffix, got, err)
		}
	}
}

// What dpkg-deb makes is read, in each of its compressions.
func TestPackagesOfTheRealTool(t *testing.T) {
	dir := t.TempDir()
	for name, content := range map[string]string{"DEBIAN/control": "Package: tool\nVersion: 1\nArchitecture: all\nMaintainer: x <x@example.org>\nDescription: x\n",
		"usr/share/tool/" + strings.Repeat("long", 40): "named", "usr/bin/tool": "run"} {
		name = filepath.Join(dir, "tree", name)
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []string{"none", "gzip", "xz", "zstd"} {
		out := filepath.Join(dir, c+".deb")
		if said, err := exec.Command("dpkg-deb", "-Z"+c, "--root-owner-group", "-b", filepath.Join(dir, "tree"), out).CombinedOutput(); err != nil {
			t.Fatalf("dpkg-deb -Z%s: %v: %s", c, err, said)
		}
		deb, err := os.ReadFile(out)
		if err != nil {
			t.Fatal(err)
		}
		got, err := read(deb, Limits{}, everything)
		if err != nil || len(got) != 2 || got["usr/bin/tool"] != "run" || got["usr/share/tool/"+strings.Repeat("long", 40)] != "named" {
			t.Errorf("%s: %v %v", c, got, err)
		}
	}
}

func TestHostilePackages(t *testing.T) {
	file := func(name string) debiantest.File { return debiantest.File{Name: name, Content: []byte("content")} }
	binary, control := debiantest.Member{Name: "debian-binary", Content: []byte("2.0\n")}, debiantest.Member{Name: "control.tar.gz", Content: []byte("x")}
	data := func(suffix string, b []byte) []byte {
		return debiantest.Ar(binary, control, debiantest.Member{Name: "data.tar" + suffix, Content: b})
	}
	bomb := debiantest.Deb(t, ".xz", debiantest.File{Name: "./zeros", Content: make([]byte, 8<<20)})
	good := debiantest.Deb(t, ".xz", file("./a"), file("./b"))
	var wide bytes.Buffer
	w, err := xz.WriterConfig{DictCap: 512 << 20}.NewWriter(&wide)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write([]byte("text")); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	small := Limits{Total: 1 << 20, File: 1 << 16, Files: 3}
	for _, c := range []struct {
		name string
		deb  []byte
		text string
	}{
		{"empty", nil, "no ar"},
		{"no ar", []byte("PK\x03\x04 and more"), "no ar"},
		{"no members", debiantest.Ar(), "no member"},
		{"data first", debiantest.Ar(debiantest.Member{Name: "data.tar", Content: debiantest.Tar(t)}), "member 0"},
		{"no data", debiantest.Ar(binary, control), "no member"},
		{"another format", debiantest.Ar(debiantest.Member{Name: "debian-binary", Content: []byte("3.0\n")}), "format"},
		{"another member", debiantest.Ar(binary, debiantest.Member{Name: "evil", Content: []byte("x")}), "evil"},
		{"a size that is negative", bytes.Replace(good, []byte("100644  4 "), []byte("100644  -4"), 1), "header"},
		{"a member larger than the file", bytes.Replace(good, []byte("100644  4  "), []byte("100644  9e9"), 1), "header"},
		{"another compression", data(".lzma", []byte("x")), "not known"},
		{"damaged xz", data(".xz", []byte("\xfd7zXZ\x00 nothing")), "xz"},
		{"xz that wants memory", data(".xz", wide.Bytes()), "dictionary"},
		{"cut off", good[:len(good)-40], ""},
		{"damaged behind the tar", flipped(good, len(good)-20), ""},
		{"cut off in the tar", data("", debiantest.Tar(t, file("./a"))[:515]), ""},
		{"above the root", debiantest.Deb(t, "", file("./../etc/passwd")), "leaves the root"},
		{"above the root, later", debiantest.Deb(t, "", file("./a/../../b")), "leaves the root"},
		{"absolute", debiantest.Deb(t, "", file("/etc/passwd")), "leaves the root"},
		{"two dots alone", debiantest.Deb(t, "", debiantest.File{Name: "..", Type: tar.TypeDir}), "leaves the root"},
		{"twice", debiantest.Deb(t, "", file("./a"), file("a")), "twice"},
		{"a symlink for a file", debiantest.Deb(t, "", debiantest.File{Name: "./a", Type: tar.TypeSymlink, Link: "/etc/passwd"}), "no regular file"},
		{"a hard link for a file", debiantest.Deb(t, "", debiantest.File{Name: "./a", Type: tar.TypeLink, Link: "./b"}), "no regular file"},
		{"a device", debiantest.Deb(t, "", debiantest.File{Name: "./sda", Type: tar.TypeBlock}), "type"},
		{"too many files", debiantest.Deb(t, "", file("./a"), file("./b"), file("./c"), file("./d")), "more than 3 files"},
		{"a file too large", debiantest.Deb(t, "", debiantest.File{Name: "./a", Content: make([]byte, 1<<17)}), "at most"},
	} {
		got, err := read(c.deb, small, everything)
		if dsec.ClassOf(err) != dsec.Corrupt || !strings.Contains(err.Error(), c.text) {
			t.Errorf("%s: %v %v, want %q", c.name, got, err, c.text)
		}
	}
	// What is not wanted counts all the same.
	if _, err := read(bomb, small, func(string) bool { return false }); dsec.ClassOf(err) != dsec.Corrupt || !strings.Contains(err.Error(), "more than 1048576 bytes") {
		t.Errorf("a bomb: %v", err)
	}
}

func flipped(b []byte, at int) []byte {
	b = bytes.Clone(b)
	b[at] ^= 1
	return b
}

// An error of the caller's is the caller's, not one of the archive.
func TestTheCallersErrorComesBack(t *testing.T) {
	own := dsec.E(dsec.NoSpace, "write", "x", nil)
	err := EachFile(bytes.NewReader(debiantest.Deb(t, ".xz", debiantest.File{Name: "./a", Content: []byte("1")})), "tool", Limits{}, everything,
		func(string, int64, io.Reader) error { return fmt.Errorf("keep: %w", own) })
	if dsec.ClassOf(err) != dsec.NoSpace {
		t.Error(err)
	}
}

func FuzzDeb(f *testing.F) {
	f.Add(debiantest.Deb(f, ".xz", debiantest.File{Name: "./a", Content: []byte("1")}))
	f.Add(debiantest.Deb(f, "", debiantest.File{Name: "./a/b", Content: []byte("1")}, debiantest.File{Name: "./c", Type: tar.TypeSymlink, Link: "a"}))
	f.Add(debiantest.Deb(f, ".zst", debiantest.File{Name: "./a"}))
	f.Add(debiantest.Ar(debiantest.Member{Name: "debian-binary", Content: []byte("2.0\n")}))
	f.Fuzz(func(t *testing.T, deb []byte) {
		_, err := read(deb, Limits{Total: 1 << 20, File: 1 << 20, Files: 100}, func(name string) bool {
			if name[0] == '/' || strings.HasPrefix(name, "../") || strings.Contains(name, "/../") {
				t.Errorf("handed out: %q", name)
			}
			return true
		})
		if err != nil && dsec.ClassOf(err) != dsec.Corrupt && dsec.ClassOf(err) != dsec.Unsupported {
			t.Errorf("%v (%s)", err, dsec.ClassOf(err))
		}
	})
}

package image

import (
	"archive/tar"
	"bytes"
	"context"
	"os"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// member is one member of a test tar: a header and, for files, its content.
type member struct {
	tar.Header
	body string
}

func dir(name string) member {
	return member{Header: tar.Header{Name: name, Typeflag: tar.TypeDir, Mode: 0o755}}
}

func file(name, body string) member {
	return member{Header: tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644, Size: int64(len(body))}, body: body}
}

func hardLink(name, to string) member {
	return member{Header: tar.Header{Name: name, Typeflag: tar.TypeLink, Linkname: to}}
}

func symlink(name, to string) member {
	return member{Header: tar.Header{Name: name, Typeflag: tar.TypeSymlink, Linkname: to}}
}

func node(name string, kind byte, major, minor int64) member {
	return member{Header: tar.Header{Name: name, Typeflag: kind, Mode: 0o600, Devmajor: major, Devminor: minor}}
}

func xattr(m member, name, value string) member {
	m.Format = tar.FormatPAX
	if m.PAXRecords == nil {
		m.PAXRecords = map[string]string{}
	}
	m.PAXRecords[paxXattr+name] = value
	return m
}

func makeTar(t testing.TB, members ...member) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, m := range members {
		h := m.Header
		if h.ModTime.IsZero() {
			h.ModTime = time.Unix(1700000000, 0)
		}
		if err := w.WriteHeader(&h); err != nil {
			t.Fatalf("%s: %v", h.Name, err)
		}
		if _, err := w.Write([]byte(m.body)); err != nil {
			t.Fatalf("%s: %v", h.Name, err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func writeFile(t testing.TB, b []byte) string {
	t.Helper()
	p := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(p, b, 0o600); err != nil {
		t.Fatal(err)
	}
	return p
}

// converted is a layer on disk.
type converted struct {
	Result
	meta, data string
}

func tryConvert(t testing.TB, source string, opts Options) (converted, error) {
	t.Helper()
	loc, err := Locate(source)
	if err != nil {
		return converted{}, err
	}
	return tryConvertAt(t, loc, opts)
}

func convertAt(t testing.TB, loc Location, opts Options) converted {
	t.Helper()
	c, err := tryConvertAt(t, loc, opts)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func tryConvertAt(t testing.TB, loc Location, opts Options) (converted, error) {
	t.Helper()
	d := t.TempDir()
	open := func(name string) *os.File {
		f, err := os.Create(filepath.Join(d, name))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { f.Close() })
		return f
	}
	files := Files{Meta: open("meta"), Data: open("data"), Scratch: open("scratch")}
	res, err := Convert(context.Background(), loc, files, opts)
	return converted{res, files.Meta.Name(), files.Data.Name()}, err
}

func mustConvert(t testing.TB, source string, opts Options) converted {
	t.Helper()
	c, err := tryConvert(t, source, opts)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// EachWay runs a test over layers whose data come to their mounts in every way,
// Device is what a layer is to be mounted with: see ondemandtest.
var (
	EachWay func(*testing.T, func(testing.TB))
	Device  func(t testing.TB, meta, data string) string
)

// mount lets the kernel show a layer.
func mount(t testing.TB, c converted) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("mounting needs root: uid is", os.Geteuid())
	}
	opts := ""
	if c.DataSize > 0 {
		opts = "device=" + Device(t, c.meta, c.data)
	}
	dir := t.TempDir()
	if err := unix.Mount(c.meta, dir, "erofs", unix.MS_RDONLY|unix.MS_NODEV, opts); err != nil {
		t.Fatalf("mount: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error("unmount:", err)
		}
	})
	return dir
}

func TestTarAndDirectoryGiveTheSameTree(t *testing.T) {
	src := t.TempDir()
	for _, d := range []string{"a", "a/b", ".wh.real"} {
		if err := os.Mkdir(filepath.Join(src, d), 0o750); err != nil {
			t.Fatal(err)
		}
	}
	for name, body := range map[string]string{"a/x": "hello", "a/b/.wh.x": "kept", "empty": ""} {
		if err := os.WriteFile(filepath.Join(src, name), []byte(body), 0o640); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Link(filepath.Join(src, "a/x"), filepath.Join(src, "a/y")); err != nil {
		t.Fatal(err)
	}
	c := mustConvert(t, src, Options{})
	got := mount(t, c)
	for name, body := range map[string]string{"a/x": "hello", "a/y": "hello", "a/b/.wh.x": "kept", "empty": ""} {
		b, err := os.ReadFile(filepath.Join(got, name))
		if err != nil || string(b) != body {
			t.Errorf("%s: %q, %v", name, b, err)
		}
	}
	var st unix.Stat_t
	if err := unix.Stat(filepath.Join(got, "a/y"), &st); err != nil || st.Nlink != 2 {
		t.Errorf("a/y: %d links, %v", st.Nlink, err)
	}
	tarball := writeFile(t, makeTar(t, file("a/x", "hello"), hardLink("a/y", "a/x")))
	got = mount(t, mustConvert(t, tarball, Options{At: "/work", Owner: &Owner{UID: 7, GID: 8}}))
	if err := unix.Stat(filepath.Join(got, "work/a/y"), &st); err != nil || st.Nlink != 2 || st.Uid != 7 || st.Gid != 8 {
		t.Errorf("work/a/y: %+v, %v", st, err)
	}
	top := member{Header: tar.Header{Name: "./", Typeflag: tar.TypeDir, Mode: 0o2750, Uid: 5}}
	got = mount(t, mustConvert(t, writeFile(t, makeTar(t, top, file("f", "x"))), Options{At: "/a/repo"}))
	if err := unix.Stat(filepath.Join(got, "a/repo"), &st); err != nil || st.Mode&0o7777 != 0o2750 || st.Uid != 5 {
		t.Errorf("what the source is like itself: %o of %d, %v", st.Mode, st.Uid, err)
	}
}

func goarch() string { return runtime.GOARCH }

func mkfifo(p string) error {
	if err := unix.Mkfifo(p, 0o600); err != nil {
		return err
	}
	return os.Chmod(p, 0o600)
}

func nlink(st os.FileInfo) uint64 { return uint64(st.Sys().(*syscall.Stat_t).Nlink) }

package image

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"log"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
)

func newRegistry(t testing.TB) (host string) {
	t.Helper()
	srv := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	t.Cleanup(srv.Close)
	return strings.TrimPrefix(srv.URL, "http://")
}

// makeImage builds an image of our platform from layers given as tars.
func makeImage(t testing.TB, tars ...[]byte) v1.Image {
	t.Helper()
	img := v1.Image(empty.Image)
	for _, b := range tars {
		l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(b)), nil })
		if err != nil {
			t.Fatal(err)
		}
		if img, err = mutate.AppendLayers(img, l); err != nil {
			t.Fatal(err)
		}
	}
	cf, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	cf = cf.DeepCopy()
	cf.OS, cf.Architecture = "linux", goarch()
	cf.Config = v1.Config{Env: []string{"PATH=/bin", "A=b"}, User: "1000", WorkingDir: "/work", Cmd: []string{"sh"}}
	if img, err = mutate.ConfigFile(img, cf); err != nil {
		t.Fatal(err)
	}
	return img
}

func push(t testing.TB, ref string, img v1.Image) string {
	t.Helper()
	r, err := name.ParseReference(ref)
	if err != nil {
		t.Fatal(err)
	}
	if err := remote.Write(r, img); err != nil {
		t.Fatal(err)
	}
	return "docker://" + ref
}

// merged pushes an image of the layers, converts it and mounts it.
func merged(t testing.TB, layers ...[]byte) string {
	t.Helper()
	return mount(t, mustConvert(t, push(t, newRegistry(t)+"/test:1", makeImage(t, layers...)), Options{}))
}

// listing maps every name below a mounted root to what it is.
func listing(t testing.TB, root string) map[string]string {
	t.Helper()
	out := map[string]string{}
	err := filepath.WalkDir(root, func(p string, d os.DirEntry, err error) error {
		if err != nil || p == root {
			return err
		}
		rel, _ := filepath.Rel(root, p)
		switch {
		case d.IsDir():
			out[rel] = "dir"
		case d.Type().IsRegular():
			b, err := os.ReadFile(p)
			if err != nil {
				return err
			}
			out[rel] = string(b)
		case d.Type()&os.ModeSymlink != 0:
			to, err := os.Readlink(p)
			if err != nil {
				return err
			}
			out[rel] = "-> " + to
		default:
			out[rel] = d.Type().String()
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func expect(t testing.TB, root string, want map[string]string) {
	t.Helper()
	got := listing(t, root)
	for p, w := range want {
		if g, ok := got[p]; !ok || g != w {
			t.Errorf("%s: %q, want %q", p, g, w)
		}
	}
	for p, g := range got {
		if _, ok := want[p]; !ok && g != "dir" {
			t.Errorf("%s: %q is there", p, g)
		}
	}
}

func TestE1_WhiteoutRemoves(t *testing.T) {
	EachWay(t, func(t testing.TB) {
		root := merged(t, makeTar(t, file("a", "1"), file("d/b", "2"), file("keep", "3")),
			makeTar(t, file(".wh.a", ""), file(".wh.d", ""), file(".wh.never", "")))
		expect(t, root, map[string]string{"keep": "3"})
		if got := listing(t, root); len(got) != 1 {
			t.Errorf("left: %v", got)
		}
	})
}

func TestE3_LayersTakeEffectInOrder(t *testing.T) {
	EachWay(t, func(t testing.TB) {
		root := merged(t, makeTar(t, file("x", "1"), file("d/low", "1")),
			makeTar(t, file(".wh.x", ""), file("d/.wh..wh..opq", ""), file("d/mid", "2")),
			makeTar(t, file("x", "3"), file("d/top", "3")))
		expect(t, root, map[string]string{"x": "3", "d/mid": "2", "d/top": "3"})
	})
}

func TestE5_OpaqueHidesBelowOnly(t *testing.T) {
	EachWay(t, func(t testing.TB) {
		root := merged(t, makeTar(t, file("d/low", "1"), file("d/sub/low", "1"), file("e/low", "1")),
			makeTar(t, dir("d"), file("d/before", "2"), file("d/.wh..wh..opq", ""), file("d/after", "2"), file("e/.wh..wh.opq", "")))
		expect(t, root, map[string]string{"d/before": "2", "d/after": "2", "e/low": "1"})
	})
}

// TestWhiteoutOrderInOneLayer: whatever comes first in the tar, a whiteout
// hides what is below and not what comes with it.
func TestWhiteoutOrderInOneLayer(t *testing.T) {
	EachWay(t, func(t testing.TB) {
		low := makeTar(t, file("a", "low"), file("d/x", "low"))
		for _, top := range [][]byte{
			makeTar(t, file(".wh.a", ""), file("a", "top"), file(".wh.d", ""), file("d/y", "top")),
			makeTar(t, file("a", "top"), file("d/y", "top"), file(".wh.a", ""), file(".wh.d", "")),
		} {
			expect(t, merged(t, low, top), map[string]string{"a": "top", "d/y": "top"})
		}
	})
}

func TestE8_HardLinkReplacesWhatIsThere(t *testing.T) {
	EachWay(t, func(t testing.TB) {
		root := merged(t, makeTar(t, file("perl", "old"), file("perl5", "other"), symlink("sym", "perl"), file("dir/x", "1")),
			makeTar(t, file("perl", "new"), hardLink("perl5", "perl"), hardLink("sym", "perl"), hardLink("dir", "perl")))
		expect(t, root, map[string]string{"perl": "new", "perl5": "new", "sym": "new", "dir": "new"})
		var st unix.Stat_t
		if err := unix.Stat(filepath.Join(root, "dir"), &st); err != nil || st.Nlink != 4 {
			t.Errorf("%d links, %v", st.Nlink, err)
		}
	})
}

func TestE10_HardLinkOutlivesItsTarget(t *testing.T) {
	EachWay(t, func(t testing.TB) {
		root := merged(t, makeTar(t, file("a", "content"), hardLink("b", "a")), makeTar(t, file(".wh.a", "")))
		expect(t, root, map[string]string{"b": "content"})
		root = merged(t, makeTar(t, file("a", "content")), makeTar(t, file(".wh.a", ""), hardLink("b", "a")))
		expect(t, root, map[string]string{"b": "content"})
	})
}

func TestE13_ImplicitParents(t *testing.T) {
	EachWay(t, func(t testing.TB) {
		root := merged(t, makeTar(t, file("a/b/c", "x")))
		for _, d := range []string{"a", "a/b"} {
			var st unix.Stat_t
			if err := unix.Stat(filepath.Join(root, d), &st); err != nil || st.Mode != unix.S_IFDIR|0o755 || st.Uid != 0 || st.Gid != 0 {
				t.Errorf("%s: %o %d:%d, %v", d, st.Mode, st.Uid, st.Gid, err)
			}
		}
		// A parent that is there keeps what it is.
		low := dir("a")
		low.Mode, low.Uid = 0o700, 5
		root = merged(t, makeTar(t, low), makeTar(t, file("a/b/c", "x")))
		var st unix.Stat_t
		if err := unix.Stat(filepath.Join(root, "a"), &st); err != nil || st.Mode != unix.S_IFDIR|0o700 || st.Uid != 5 {
			t.Errorf("a: %o %d, %v", st.Mode, st.Uid, err)
		}
	})
}

func TestE16_HostileNames(t *testing.T) {
	for what, members := range map[string][]member{
		"climbing name":      {file("../x", "")},
		"climbing deeper":    {file("a/../../x", "")},
		"climbing hard link": {hardLink("x", "../../etc/shadow")},
		"missing hard link":  {hardLink("x", "etc/shadow")},
		"link to directory":  {dir("d"), hardLink("x", "d")},
		"whiteout of ..":     {file("d/.wh...", "")},
		"whiteout of .":      {file("d/.wh..", "")},
		"whiteout of none":   {file("d/.wh.", "")},
		"below a whiteout":   {file(".wh.d/x", "")},
		"long name":          {{Header: tar.Header{Name: strings.Repeat("n", 256), Typeflag: tar.TypeReg, Format: tar.FormatPAX}}},
		"link loop":          {symlink("a", "b"), symlink("b", "a"), file("a/x", "")},
		"long target":        {symlink("a", strings.Repeat("t/", 2048))},
	} {
		t.Run(what, func(t *testing.T) {
			src := push(t, newRegistry(t)+"/test:1", makeImage(t, makeTar(t, members...)))
			if _, err := tryConvert(t, src, Options{}); !errors.Is(err, dsec.Invalid.Err()) {
				t.Errorf("got %v", err)
			}
		})
	}
	EachWay(t, func(t testing.TB) {
		root := merged(t, makeTar(t, symlink("out", "../../../.."), symlink("abs", "/"), symlink("dangling", "/no/where"),
			file("out/one", "1"), file("abs/two", "2"), file("/three", "3"), file("dangling/four", "4")))
		expect(t, root, map[string]string{"out": "-> ../../../..", "abs": "-> /", "dangling": "-> /no/where",
			"one": "1", "two": "2", "three": "3", "no/where/four": "4"})
	})
}

func TestE21_NamesThatLookLikeWhiteouts(t *testing.T) {
	EachWay(t, func(t testing.TB) {
		plain := writeFile(t, makeTar(t, file("d/.wh.a", "real"), file("d/.wh..wh..opq", "real")))
		expect(t, mount(t, mustConvert(t, plain, Options{})), map[string]string{"d/.wh.a": "real", "d/.wh..wh..opq": "real"})
		expect(t, merged(t, makeTar(t, file("a", "1"), file("x.wh.a", "2"), file(".whatever", "3"), file("d/.wh.a", ""))),
			map[string]string{"a": "1", "x.wh.a": "2", ".whatever": "3"})
	})
}

func TestE23_AttributesAreKept(t *testing.T) {
	EachWay(t, func(t testing.TB) {
		capability := "\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"
		acl := "\x02\x00\x00\x00\x01\x00\x06\x00\xff\xff\xff\xff\x04\x00\x04\x00\xff\xff\xff\xff\x20\x00\x04\x00\xff\xff\xff\xff"
		root := merged(t, makeTar(t, xattr(file("bin/ping", "elf"), "security.capability", capability),
			xattr(dir("shared"), "system.posix_acl_default", acl), xattr(xattr(file("f", ""), "user.a", "1"), "user.b", ""),
			xattr(file("odd", ""), "btrfs.compression", "zstd")))
		for _, c := range []struct{ file, name, want string }{
			{"bin/ping", "security.capability", capability}, {"shared", "system.posix_acl_default", acl}, {"f", "user.a", "1"}, {"f", "user.b", ""},
		} {
			b := make([]byte, 256)
			n, err := unix.Getxattr(filepath.Join(root, c.file), c.name, b)
			if err != nil || string(b[:n]) != c.want {
				t.Errorf("%s: %s: %q, %v", c.file, c.name, b[:max(0, n)], err)
			}
		}
	})
}

func TestE25_LinkedWhiteoutNodes(t *testing.T) {
	EachWay(t, func(t testing.TB) {
		tarball := writeFile(t, makeTar(t, node("w1", tar.TypeChar, 0, 0), hardLink("w2", "w1"), hardLink("d/w3", "w1"), file("f", "x")))
		low := mount(t, mustConvert(t, writeFile(t, makeTar(t, file("w1", "low"), file("w2", "low"), file("d/w3", "low"), file("stays", "low"))), Options{}))
		top := mount(t, mustConvert(t, tarball, Options{KeepWhiteouts: true}))
		expect(t, overlay(t, "", top, low), map[string]string{"f": "x", "stays": "low"})
	})
}

// overlay stacks mounted layers, top first, as the kernel does.
func overlay(t testing.TB, opts string, layers ...string) string {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mount("overlay", dir, "overlay", unix.MS_RDONLY, "lowerdir="+strings.Join(layers, ":")+opts); err != nil {
		t.Fatalf("mount overlay: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error("unmount:", err)
		}
	})
	return dir
}

func TestE6_OpaqueInBothModes(t *testing.T) {
	EachWay(t, func(t testing.TB) {
		low := mount(t, mustConvert(t, writeFile(t, makeTar(t, file("d/low", "1"), file("gone", "1"), file("stays", "1"))), Options{}))
		upper := makeTar(t, dir("d"), file("d/.wh..wh..opq", ""), file("d/new", "2"), file("d/.wh.low", ""), file(".wh.gone", ""))
		for _, userXattr := range []bool{false, true} {
			img := push(t, newRegistry(t)+"/test:1", makeImage(t, upper))
			top := mount(t, mustConvert(t, img, Options{KeepWhiteouts: true, UserXattr: userXattr}))
			opts := ""
			if userXattr {
				opts = ",userxattr"
			}
			expect(t, overlay(t, opts, top, low), map[string]string{"d/new": "2", "stays": "1"})
			if _, err := os.Lstat(filepath.Join(top, "d/low")); !os.IsNotExist(err) {
				t.Errorf("a whiteout stays in an opaque directory: %v", err)
			}
		}
	})
}

// TestKeptWhiteoutsAcrossLayers: an image of two layers made to stand on a base
// hides with its second what its first and the base have.
func TestKeptWhiteoutsAcrossLayers(t *testing.T) {
	EachWay(t, func(t testing.TB) {
		base := mount(t, mustConvert(t, writeFile(t, makeTar(t, file("a", "0"), file("d/base", "0"), file("e/base", "0"), file("stays", "0"))), Options{}))
		img := push(t, newRegistry(t)+"/test:1", makeImage(t, makeTar(t, file("a", "1"), file("d/one", "1"), file("e/one", "1")),
			makeTar(t, file(".wh.a", ""), file("d/.wh..wh..opq", ""), file("d/two", "2"), file(".wh.e", ""), file("e/two", "2"))))
		top := mount(t, mustConvert(t, img, Options{KeepWhiteouts: true}))
		expect(t, overlay(t, "", top, base), map[string]string{"d/two": "2", "e/two": "2", "stays": "0"})
	})
}

package files

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
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
)

// copyTree downloads from one service into another.
func copyTree(t *testing.T, from FS, src string, to FS, dst string) {
	t.Helper()
	r, w := io.Pipe()
	go func() { w.CloseWithError(from.Download(t.Context(), src, w, TreeOptions{})) }()
	must(t, to.Upload(t.Context(), dst, r, TreeOptions{}))
}

func TestD6_LinksStayLinksBothWays(t *testing.T) {
	each(t, func(t *testing.T, s service) {
		links := map[string]string{"rel": "file", "abs": "/t/file", "up": "../t/file", "dangling": "/no/such", "loop": "loop", "self/dir": ".."}
		put(t, s, "/t/file", "x")
		must(t, os.Mkdir(s.host("/t/self"), 0o755))
		for name, to := range links {
			must(t, os.Symlink(to, s.host("/t/"+name)))
		}
		copyTree(t, s.fs, "/t", s.fs, "/copy/of")
		for name, to := range links {
			if got, err := os.Readlink(s.host("/copy/of/" + name)); got != to {
				t.Errorf("%s points to %q, %v", name, got, err)
			}
		}
	})
}

func TestTreesKeepWhatTheyAre(t *testing.T) {
	each(t, func(t *testing.T, s service) {
		when := time.Unix(1600000000, 987654321)
		put(t, s, "/t/dir/suid", "s")
		must(t, os.Chown(s.host("/t/dir/suid"), 3, 70000))
		must(t, unix.Chmod(s.host("/t/dir/suid"), 0o6751))
		must(t, unix.Setxattr(s.host("/t/dir/suid"), "user.note", []byte("a\x00b\n"), 0))
		must(t, os.Link(s.host("/t/dir/suid"), s.host("/t/twin")))
		must(t, unix.Chmod(s.host("/t/dir"), 0o1555))
		must(t, unix.Mkfifo(s.host("/t/fifo"), 0o622))
		must(t, unix.Chmod(s.host("/t/fifo"), 0o622))
		must(t, os.Symlink("x", s.host("/t/link")))
		must(t, os.Lchown(s.host("/t/link"), 5, 6))
		for _, p := range []string{"/t/dir/suid", "/t/dir", "/t/link"} {
			must(t, setMTime(unix.AT_FDCWD, s.host(p), when, unix.AT_SYMLINK_NOFOLLOW))
		}
		copyTree(t, s.fs, "/t", s.fs, "/c")
		for _, p := range []string{"", "/dir", "/dir/suid", "/twin", "/fifo", "/link"} {
			if p == "" {
				continue
			}
			a, b := lstat(t, s.host("/t"+p)), lstat(t, s.host("/c"+p))
			if a.Mode != b.Mode || a.Uid != b.Uid || a.Gid != b.Gid || a.Nlink != b.Nlink || a.Size != b.Size && a.Mode&unix.S_IFDIR == 0 {
				t.Errorf("%s: %o %d:%d ×%d became %o %d:%d ×%d", p, a.Mode, a.Uid, a.Gid, a.Nlink, b.Mode, b.Uid, b.Gid, b.Nlink)
			}
			if a.Mtim != b.Mtim {
				t.Errorf("%s: time %v became %v", p, a.Mtim, b.Mtim)
			}
		}
		if a, b := lstat(t, s.host("/c/twin")), lstat(t, s.host("/c/dir/suid")); a.Ino != b.Ino {
			t.Error("the hard link is a copy")
		}
		v := make([]byte, 64)
		n, err := unix.Getxattr(s.host("/c/twin"), "user.note", v)
		if err != nil || string(v[:n]) != "a\x00b\n" {
			t.Errorf("attribute is %q, %v", v[:max(n, 0)], err)
		}
	})
}

func lstat(t *testing.T, path string) (st unix.Stat_t) {
	t.Helper()
	must(t, unix.Lstat(path, &st))
	return st
}

// sparseFile has data at the start, in the middle and a hole at the end.
func sparseFile(t *testing.T, path string) {
	f, err := os.Create(path)
	must(t, err)
	defer f.Close()
	for _, off := range []int64{0, 40 << 20, 80 << 20} {
		_, err := f.WriteAt(bytes.Repeat([]byte("data"), 4096), off)
		must(t, err)
	}
	must(t, f.Truncate(100<<20))
}

func TestSparseFilesStaySparse(t *testing.T) {
	each(t, func(t *testing.T, s service) {
		must(t, os.Mkdir(s.host("/t"), 0o755))
		sparseFile(t, s.host("/t/sparse"))
		must(t, os.WriteFile(s.host("/t/hole"), nil, 0o644))
		must(t, os.Truncate(s.host("/t/hole"), 1<<40))
		if lstat(t, s.host("/t/sparse")).Blocks*512 > 10<<20 {
			t.Skip("this file system keeps no holes")
		}
		var b bytes.Buffer
		must(t, s.fs.Download(t.Context(), "/t", &b, TreeOptions{}))
		if b.Len() > 1<<20 {
			t.Errorf("the tar has %d bytes", b.Len())
		}
		must(t, os.Remove(s.host("/t/hole")))
		copyTree(t, s.fs, "/t", s.fs, "/c")
		st := lstat(t, s.host("/c/sparse"))
		if st.Size != 100<<20 || st.Blocks*512 > 1<<20 {
			t.Errorf("copy has %d bytes in %d blocks", st.Size, st.Blocks)
		}
		must(t, exec.Command("cmp", s.host("/t/sparse"), s.host("/c/sparse")).Run())
	})
}

func TestOtherProgramsReadOurTars(t *testing.T) {
	root := newRoot(t)
	s := service{local(t, root), root}
	must(t, os.Mkdir(s.host("/t"), 0o755))
	sparseFile(t, s.host("/t/sparse"))
	long := strings.Repeat("long/", 40) + "name"
	put(t, s, "/t/"+long, "deep")
	put(t, s, "/t/bad\xffname", "bad")
	must(t, os.Symlink(strings.Repeat("x", 200), s.host("/t/link")))
	tarFile := filepath.Join(t.TempDir(), "t.tar")
	f, err := os.Create(tarFile)
	must(t, err)
	must(t, s.fs.Download(t.Context(), "/t", f, TreeOptions{}))
	must(t, f.Close())
	for _, cmd := range [][]string{
		{"tar", "-xf", tarFile, "-C"},
		{"python3", "-c", "import sys,tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2])", tarFile},
	} {
		out := t.TempDir()
		if b, err := exec.Command(cmd[0], append(cmd[1:], out)...).CombinedOutput(); err != nil {
			t.Errorf("%s: %v: %s", cmd[0], err, b)
			continue
		}
		if b, err := exec.Command("diff", "-r", "--no-dereference", s.host("/t"), out).CombinedOutput(); err != nil {
			t.Errorf("%s: %v: %s", cmd[0], err, b)
		}
	}
	to := service{local(t, newRoot(t)), ""}
	for _, format := range []string{"gnu", "posix", "ustar"} {
		args := []string{"-cSf", "-", "--format=" + format, "-C", s.host("/t"), "sparse"}
		if format == "ustar" {
			args[0] = "-cf"
		}
		b, err := exec.Command("tar", args...).Output()
		must(t, err)
		must(t, to.fs.Upload(t.Context(), "/"+format, bytes.NewReader(b), TreeOptions{}))
		i, err := to.fs.Stat(t.Context(), "/"+format+"/sparse", false)
		if err != nil || i.Size != 100<<20 {
			t.Errorf("%s: %+v, %v", format, i, err)
		}
	}
}

func TestGlobsChooseArtifacts(t *testing.T) {
	each(t, func(t *testing.T, s service) {
		for _, p := range []string{"a.xml", "r/b.xml", "r/s/c.xml", "r/s/c.txt", "q/out"} {
			put(t, s, "/w/"+p, p)
		}
		for _, c := range []struct{ globs, want string }{
			{"*.xml", "a.xml"},
			{"**/*.xml", "a.xml r/b.xml r/s/c.xml"},
			{"/r/**", "r/ r/b.xml r/s/ r/s/c.txt r/s/c.xml"},
			{"r/*/c.* q/o?t", "q/out r/s/c.txt r/s/c.xml"},
			{"none", ""},
		} {
			var b bytes.Buffer
			must(t, s.fs.Download(t.Context(), "/w", &b, TreeOptions{Globs: strings.Fields(c.globs)}))
			if got := strings.Join(tarNames(t, &b), " "); got != c.want {
				t.Errorf("%s: %s, want %s", c.globs, got, c.want)
			}
		}
		wantClass(t, s.fs.Download(t.Context(), "/w", io.Discard, TreeOptions{Globs: []string{"[a"}}), dsec.Invalid)
		wantClass(t, s.fs.Download(t.Context(), "/w", io.Discard, TreeOptions{Max: 2000}), dsec.ResourceExhausted, "2000 bytes")
		wantClass(t, s.fs.Download(t.Context(), "/w/a.xml", io.Discard, TreeOptions{}), dsec.NotADirectory)
	})
}

func tarNames(t *testing.T, r io.Reader) (names []string) {
	for tr := tar.NewReader(r); ; {
		h, err := tr.Next()
		if err == io.EOF {
			return names
		}
		must(t, err)
		names = append(names, h.Name)
	}
}

// tarOf makes an archive of headers; a regular one has content "evil".
func tarOf(t *testing.T, hs ...tar.Header) []byte {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range hs {
		if h.Mode == 0 {
			h.Mode = 0o755
		}
		if h.Typeflag == tar.TypeReg {
			h.Size = 4
		}
		must(t, w.WriteHeader(&h))
		if h.Typeflag == tar.TypeReg {
			_, err := w.Write([]byte("evil"))
			must(t, err)
		}
	}
	must(t, w.Close())
	return b.Bytes()
}

func TestHostileTarsStayInside(t *testing.T) {
	file := func(n string) tar.Header { return tar.Header{Name: n, Typeflag: tar.TypeReg} }
	link := func(n, to string) tar.Header { return tar.Header{Name: n, Linkname: to, Typeflag: tar.TypeSymlink} }
	hard := func(n, to string) tar.Header { return tar.Header{Name: n, Linkname: to, Typeflag: tar.TypeLink} }
	cases := map[string][]tar.Header{
		"dots":              {file("../evil")},
		"dots inside":       {file("a/../../evil")},
		"absolute":          {file("/evil")},
		"link up":           {link("l", ".."), file("l/evil")},
		"link absolute":     {link("l", "/"), file("l/evil")},
		"link chain":        {link("a", "b/.."), link("b", ".."), file("a/evil")},
		"link to directory": {link("l", "/victim"), {Name: "l/sub", Typeflag: tar.TypeDir}, file("l/sub/evil")},
		"hard link out":     {hard("h", "../victim/secret"), file("h")},
		"hard link by link": {link("l", "/victim"), hard("h", "l/secret")},
		"magic link":        {link("l", "/proc/self/root"), file("l/evil")},
		"hard link to self": {hard("h", ".")},
		"huge owner":        {{Name: "x", Typeflag: tar.TypeReg, Uid: 1 << 40}},
		"unknown":           {{Name: "x", Typeflag: 'Z'}},
	}
	for name, hs := range cases {
		t.Run(name, func(t *testing.T) {
			each(t, func(t *testing.T, s service) {
				put(t, s, "/victim/secret", "secret")
				must(t, s.fs.Mkdir(t.Context(), "/up", 0o755, false))
				err := s.fs.Upload(t.Context(), "/up/dir", bytes.NewReader(tarOf(t, hs...)), TreeOptions{})
				wantClass(t, err, dsec.Invalid, "upload")
				onlyNames(t, s.root, "up", "victim")
				onlyNames(t, s.host("/up"), "dir")
				onlyNames(t, s.host("/victim"), "secret")
				if get(t, s, "/victim/secret") != "secret" {
					t.Error("the victim was overwritten")
				}
			})
		})
	}
}

func TestLinksThatStayInsideAreFollowed(t *testing.T) {
	each(t, func(t *testing.T, s service) {
		b := tarOf(t, tar.Header{Name: "usr/lib/", Typeflag: tar.TypeDir}, tar.Header{Name: "lib", Linkname: "usr/lib", Typeflag: tar.TypeSymlink},
			tar.Header{Name: "./lib/x", Typeflag: tar.TypeReg}, tar.Header{Name: "./", Typeflag: tar.TypeDir, Mode: 0o700}, tar.Header{Name: "lib/", Typeflag: tar.TypeDir})
		must(t, s.fs.Upload(t.Context(), "/d", bytes.NewReader(b), TreeOptions{UID: ptr(uint32(4)), GID: ptr(uint32(5))}))
		if get(t, s, "/d/usr/lib/x") != "evil" {
			t.Error("not followed")
		}
		for _, p := range []string{"/d", "/d/usr", "/d/usr/lib", "/d/usr/lib/x", "/d/lib"} {
			if st := lstat(t, s.host(p)); st.Uid != 4 || st.Gid != 5 {
				t.Errorf("%s belongs to %d:%d", p, st.Uid, st.Gid)
			}
		}
		if lstat(t, s.host("/d")).Mode&0o777 != 0o755 {
			t.Error("the directory itself was changed")
		}
		// At the root absolute links mean the root.
		must(t, os.Symlink("/run", s.host("/var")))
		must(t, s.fs.Upload(t.Context(), "/", bytes.NewReader(tarOf(t, tar.Header{Name: "run/", Typeflag: tar.TypeDir}, tar.Header{Name: "var/x", Typeflag: tar.TypeReg})), TreeOptions{}))
		if get(t, s, "/run/x") != "evil" {
			t.Error("not written through the absolute link")
		}
	})
}

func TestUploadReplacesFilesButNoDirectories(t *testing.T) {
	each(t, func(t *testing.T, s service) {
		put(t, s, "/d/dir/x", "x")
		put(t, s, "/d/file", "old")
		must(t, os.Symlink("/d/file", s.host("/d/link")))
		must(t, s.fs.Upload(t.Context(), "/d", bytes.NewReader(tarOf(t, tar.Header{Name: "link", Typeflag: tar.TypeReg})), TreeOptions{}))
		if get(t, s, "/d/file") != "old" || lstat(t, s.host("/d/link")).Mode&unix.S_IFMT != unix.S_IFREG {
			t.Error("written through a link instead of replacing it")
		}
		err := s.fs.Upload(t.Context(), "/d", bytes.NewReader(tarOf(t, tar.Header{Name: "dir", Typeflag: tar.TypeReg})), TreeOptions{})
		wantClass(t, err, dsec.IsADirectory, "/d/dir")
	})
}

func TestBrokenTarsAreInvalid(t *testing.T) {
	each(t, func(t *testing.T, s service) {
		whole := tarOf(t, tar.Header{Name: "a", Typeflag: tar.TypeReg}, tar.Header{Name: "b", Typeflag: tar.TypeReg})
		for _, cut := range []int{100, 514, 1024 + 100} {
			err := s.fs.Upload(t.Context(), "/d", bytes.NewReader(whole[:cut]), TreeOptions{})
			wantClass(t, err, dsec.Invalid)
		}
		wantClass(t, s.fs.Upload(t.Context(), "/d", noise(10<<10), TreeOptions{}), dsec.Invalid)
		err := s.fs.Upload(t.Context(), "/d", io.MultiReader(bytes.NewReader(whole[:700]), errReader{io.ErrUnexpectedEOF}), TreeOptions{})
		wantClass(t, err, dsec.Canceled)
	})
}

func TestWhatIsNotPermittedIsNamedAndTheRestDone(t *testing.T) {
	root := newRoot(t)
	openTo(t, root)
	must(t, os.Chmod(root, 0o777))
	user := asUser(t, root, 1000)
	b := tarOf(t, tar.Header{Name: "null", Typeflag: tar.TypeChar, Devmajor: 1, Devminor: 3}, tar.Header{Name: "file", Typeflag: tar.TypeReg, Uid: 0})
	err := user.Upload(t.Context(), "/up", bytes.NewReader(b), TreeOptions{})
	wantClass(t, err, dsec.PermissionDenied, "/up/null", "operation not permitted")
	onlyNames(t, filepath.Join(root, "up"), "file")
	if st := lstat(t, filepath.Join(root, "up/file")); st.Uid != 1000 {
		t.Errorf("file belongs to %d", st.Uid)
	}
	must(t, os.WriteFile(filepath.Join(root, "up/closed"), []byte("x"), 0o600))
	var out bytes.Buffer
	err = user.Download(t.Context(), "/up", &out, TreeOptions{})
	wantClass(t, err, dsec.PermissionDenied, "/up/closed")
	if names := tarNames(t, &out); strings.Join(names, " ") != "file" {
		t.Errorf("downloaded %q", names)
	}
}

// bomb is a tar of one endless run of files.
type bomb struct {
	n    int
	rest bytes.Buffer
}

func (b *bomb) Read(p []byte) (int, error) {
	if b.rest.Len() == 0 {
		b.n++
		w := newTarWriter(&b.rest)
		if err := w.header(&entry{name: fmt.Sprintf("d%d/f%d", b.n/100, b.n), kind: '0', mode: 0o644, size: 64 << 10}); err != nil {
			return 0, err
		}
		b.rest.Write(zeros[:])
	}
	return b.rest.Read(p)
}

func TestABombStopsAtTheDiskLimit(t *testing.T) {
	each(t, func(t *testing.T, s service) {
		must(t, os.Mkdir(s.host("/m"), 0o755))
		must(t, unix.Mount("tmpfs", s.host("/m"), "tmpfs", 0, "size=8m"))
		t.Cleanup(func() { _ = unix.Unmount(s.host("/m"), unix.MNT_DETACH) })
		wantClass(t, s.fs.Upload(t.Context(), "/m", &bomb{}, TreeOptions{}), dsec.NoSpace)
	})
}

func TestDeepTreesAreRemovedAndCopied(t *testing.T) {
	each(t, func(t *testing.T, s service) {
		const depth = 300
		deep := strings.Repeat("/deepdeepdeep", depth) // 3,900 bytes
		must(t, s.fs.Mkdir(t.Context(), deep, 0o755, true))
		must(t, s.fs.Mkdir(t.Context(), "/x", 0o755, true))
		copyTree(t, s.fs, "/deepdeepdeep", s.fs, "/x")
		all, err := s.fs.List(t.Context(), "/x", 1000)
		if err != nil || len(all) != depth-1 {
			t.Errorf("%d directories, %v", len(all), err)
		}
		must(t, s.fs.Remove(t.Context(), "/deepdeepdeep", true))
		must(t, s.fs.Remove(t.Context(), "/x", true))
		onlyNames(t, s.root)
	})
}

// TestReceivedTreesGiveNoRights: what an agent made is unpacked by root on the
// machine, and must not become a way to root there.
func TestReceivedTreesGiveNoRights(t *testing.T) {
	root := newRoot(t)
	l := local(t, root)
	capability := map[string]string{"SCHILY.xattr.security.capability": "\x01\x00\x00\x02\xff\xff\xff\xff\x00\x00\x00\x00\xff\xff\xff\xff\x00\x00\x00\x00"}
	tree := tarOf(t,
		tar.Header{Name: "d", Typeflag: tar.TypeDir, Mode: 0o7777},
		tar.Header{Name: "d/setuid", Typeflag: tar.TypeReg, Mode: 0o6755, Uid: 5, PAXRecords: capability},
		tar.Header{Name: "hard", Typeflag: tar.TypeLink, Linkname: "d/setuid", Mode: 0o6755},
		tar.Header{Name: "mem", Typeflag: tar.TypeChar, Mode: 0o666, Devmajor: 1, Devminor: 1},
		tar.Header{Name: "disk", Typeflag: tar.TypeBlock, Mode: 0o6666, Devmajor: 8},
		tar.Header{Name: "after", Typeflag: tar.TypeReg, Mode: 0o644})
	wantClass(t, l.Receive(t.Context(), "/", bytes.NewReader(tree), TreeOptions{}), dsec.PermissionDenied, "mem")
	for name, mode := range map[string]uint32{"d": 0o1777, "d/setuid": 0o755, "hard": 0o755, "after": 0o644} {
		var st unix.Stat_t
		must(t, unix.Lstat(filepath.Join(root, name), &st))
		if st.Mode&0o7777 != mode {
			t.Errorf("%s has mode %o, want %o", name, st.Mode&0o7777, mode)
		}
		if n, err := unix.Listxattr(filepath.Join(root, name), make([]byte, 1000)); err == nil && n > 0 {
			t.Errorf("%s has extended attributes", name)
		}
	}
	for _, name := range []string{"mem", "disk"} {
		if _, err := os.Lstat(filepath.Join(root, name)); !os.IsNotExist(err) {
			t.Errorf("%s was made: %v", name, err)
		}
	}
}

func TestNobodysNumberIsNoOwner(t *testing.T) {
	each(t, func(t *testing.T, s service) {
		put(t, s, "/f", "x")
		none := uint32(1<<32 - 1)
		wantClass(t, s.fs.SetAttr(t.Context(), "/f", Attr{UID: &none}), dsec.Invalid, "4294967295")
		_, err := s.fs.Write(t.Context(), "/f", bytes.NewReader(nil), WriteOptions{GID: &none})
		wantClass(t, err, dsec.Invalid, "4294967295")
		err = s.fs.Upload(t.Context(), "/d", bytes.NewReader(tarOf(t)), TreeOptions{UID: &none})
		wantClass(t, err, dsec.Invalid, "4294967295")
		if get(t, s, "/f") != "x" {
			t.Error("it was written all the same")
		}
	})
}

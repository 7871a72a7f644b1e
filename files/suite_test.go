package files

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
)

func TestRangesAreRead(t *testing.T) {
	each(t, func(t *testing.T, s service) {
		put(t, s, "/r", "0123456789")
		for _, c := range []struct {
			off, n int64
			want   string
		}{{0, 3, "012"}, {7, -1, "789"}, {8, 100, "89"}, {10, -1, ""}, {99, 5, ""}, {4, 0, ""}} {
			var b bytes.Buffer
			n, err := s.fs.Read(t.Context(), "/r", c.off, c.n, &b)
			if err != nil || b.String() != c.want || n != int64(len(c.want)) {
				t.Errorf("read %d+%d: %q, %d, %v", c.off, c.n, b.String(), n, err)
			}
		}
	})
}

func TestReplacedFilesKeepModeAndOwner(t *testing.T) {
	each(t, func(t *testing.T, s service) {
		put(t, s, "/tool", "v1")
		must(t, os.Chown(s.host("/tool"), 7, 8))
		must(t, os.Chmod(s.host("/tool"), 0o755|os.ModeSetuid))
		put(t, s, "/tool", "v2")
		i, err := s.fs.Stat(t.Context(), "/tool", true)
		must(t, err)
		if i.Mode != 0o4755 || i.UID != 7 || i.GID != 8 || i.Size != 2 || i.Kind != File {
			t.Errorf("replaced file is %+v", i)
		}
		i, err = s.fs.Write(t.Context(), "/tool", strings.NewReader("v3"), WriteOptions{Mode: ptr(uint32(0o600)), UID: ptr(uint32(9))})
		must(t, err)
		if i.Mode != 0o600 || i.UID != 9 || i.GID != 8 || i.Path != "/tool" {
			t.Errorf("asked for mode and owner, got %+v", i)
		}
	})
}

func TestWriteGoesThroughLinks(t *testing.T) {
	each(t, func(t *testing.T, s service) {
		put(t, s, "/real/file", "old")
		must(t, os.Symlink("/real/file", s.host("/abs")))
		must(t, os.Symlink("../real/file", s.host("/real/rel")))
		must(t, os.Symlink("/real/new", s.host("/dangling")))
		must(t, os.Symlink("loop", s.host("/loop")))
		for _, p := range []string{"/abs", "/real/rel", "/dangling"} {
			put(t, s, p, "by "+p)
			if i, err := s.fs.Stat(t.Context(), p, false); err != nil || i.Kind != Symlink {
				t.Errorf("%s is now %+v, %v", p, i, err)
			}
			if got := get(t, s, p); got != "by "+p {
				t.Errorf("%s holds %q", p, got)
			}
		}
		if got := get(t, s, "/real/new"); got != "by /dangling" {
			t.Errorf("/real/new holds %q", got)
		}
		_, err := s.fs.Write(t.Context(), "/loop", strings.NewReader("x"), WriteOptions{})
		wantClass(t, err, dsec.Invalid, "symbolic links")
	})
}

func TestNothingOutsideTheRootIsReached(t *testing.T) {
	each(t, func(t *testing.T, s service) {
		ctx := t.Context()
		outside := filepath.Join(t.TempDir(), "secret")
		must(t, os.WriteFile(outside, []byte("secret"), 0o644))
		must(t, os.Symlink(outside, s.host("/out")))
		must(t, os.Symlink(filepath.Dir(outside), s.host("/outdir")))
		must(t, os.Symlink("/proc/self/root", s.host("/magic")))
		for _, p := range []string{"/out", "/outdir/secret", "/../../../../../../" + outside, "/magic" + outside, "/outdir/../../../../../.." + outside} {
			if n, err := s.fs.Read(ctx, p, 0, -1, io.Discard); err == nil {
				t.Errorf("read %d bytes at %s", n, p)
			}
			if _, err := s.fs.Write(ctx, p, strings.NewReader("mine"), WriteOptions{}); err == nil {
				t.Errorf("wrote at %s", p)
			}
			_ = s.fs.SetAttr(ctx, p, Attr{Mode: ptr(uint32(0o777))})
			_ = s.fs.Remove(ctx, p, true)
		}
		if b, err := os.ReadFile(outside); string(b) != "secret" || err != nil {
			t.Errorf("outside file: %q, %v", b, err)
		}
	})
}

func TestOddNamesSurvive(t *testing.T) {
	names := []string{"new\nline", " space ", "-rf", "bad\xff\xfeutf8", "ünïcode", "tab\there", "quote\"'", "*?[", strings.Repeat("n", 255), "..."}
	each(t, func(t *testing.T, s service) {
		for _, n := range names {
			put(t, s, "/odd/"+n, n)
		}
		all, err := s.fs.List(t.Context(), "/odd", 1)
		must(t, err)
		if len(all) != len(names) {
			t.Errorf("%d of %d listed", len(all), len(names))
		}
		for _, i := range all {
			if got := get(t, s, i.Path); "/odd/"+got != i.Path {
				t.Errorf("%q holds %q", i.Path, got)
			}
		}
		to := service{local(t, newRoot(t)), ""}
		copyTree(t, s.fs, "/odd", to.fs, "/odd")
		for _, n := range names {
			if got := get(t, to, "/odd/"+n); got != n {
				t.Errorf("after a copy %q holds %q", n, got)
			}
		}
		for _, n := range names {
			must(t, s.fs.Remove(t.Context(), "/odd/"+n, false))
		}
		onlyNames(t, s.host("/odd"))
	})
}

func TestSpecialFilesAreNotOpened(t *testing.T) {
	each(t, func(t *testing.T, s service) {
		must(t, unix.Mkfifo(s.host("/fifo"), 0o666))
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		_, err := s.fs.Read(ctx, "/fifo", 0, -1, io.Discard)
		wantClass(t, err, dsec.Invalid, "not a regular file")
		_, err = s.fs.Write(ctx, "/fifo", strings.NewReader("x"), WriteOptions{})
		wantClass(t, err, dsec.Invalid, "not a regular file")
		_, err = s.fs.Write(ctx, "/fifo", strings.NewReader("x"), WriteOptions{Append: true})
		wantClass(t, err, dsec.Invalid)
		i, err := s.fs.Stat(ctx, "/fifo", true)
		if err != nil || i.Kind != Other {
			t.Errorf("stat: %+v, %v", i, err)
		}
		must(t, s.fs.SetAttr(ctx, "/fifo", Attr{Mode: ptr(uint32(0o600))}))
	})
}

func TestAppendAddsAndSetAttrSets(t *testing.T) {
	each(t, func(t *testing.T, s service) {
		ctx := t.Context()
		for _, p := range []string{"a", "b", "c"} {
			_, err := s.fs.Write(ctx, "/log", strings.NewReader(p), WriteOptions{Append: true, Mode: ptr(uint32(0o640))})
			must(t, err)
		}
		if got := get(t, s, "/log"); got != "abc" {
			t.Errorf("log holds %q", got)
		}
		_, err := s.fs.Write(ctx, "/log", strings.NewReader("x"), WriteOptions{Append: true, SHA256: "00"})
		wantClass(t, err, dsec.Invalid)
		when := time.Unix(1234567890, 123456789).UTC()
		must(t, s.fs.SetAttr(ctx, "/log", Attr{Mode: ptr(uint32(0o4711)), UID: ptr(uint32(12)), GID: ptr(uint32(13)), MTime: &when}))
		i, err := s.fs.Stat(ctx, "/log", true)
		must(t, err)
		if i.Mode != 0o4711 || i.UID != 12 || i.GID != 13 || !i.MTime.Equal(when) || i.Owner != "12" {
			t.Errorf("attributes are %+v", i)
		}
	})
}

func TestMoveAndRemove(t *testing.T) {
	each(t, func(t *testing.T, s service) {
		ctx := t.Context()
		put(t, s, "/a/b/one", "1")
		put(t, s, "/two", "2")
		must(t, s.fs.Move(ctx, "/a", "/moved/"))
		must(t, s.fs.Move(ctx, "/two", "/moved/b/one"))
		if got := get(t, s, "/moved/b/one"); got != "2" {
			t.Errorf("moved file holds %q", got)
		}
		wantClass(t, s.fs.Move(ctx, "/moved", "/moved/b/x"), dsec.Invalid)
		wantClass(t, s.fs.Move(ctx, "/none", "/x"), dsec.FileNotFound, "/none")
		put(t, s, "/file", "f")
		wantClass(t, s.fs.Move(ctx, "/file", "/moved"), dsec.FileExists, "/moved")
		must(t, os.Symlink("/file", s.host("/moved/link")))
		must(t, os.Symlink("/moved", s.host("/dirlink")))
		must(t, s.fs.Remove(ctx, "/dirlink", true))
		must(t, s.fs.Remove(ctx, "/moved", true))
		wantClass(t, s.fs.Remove(ctx, "/moved", true), dsec.FileNotFound)
		onlyNames(t, s.root, "file")
		for n := range 600 {
			must(t, os.WriteFile(s.host(fmt.Sprintf("/many%d", n)), nil, 0o644))
		}
		must(t, s.fs.Mkdir(ctx, "/t", 0o755, false))
		for n := range 600 {
			must(t, os.Rename(s.host(fmt.Sprintf("/many%d", n)), s.host(fmt.Sprintf("/t/many%d", n))))
		}
		must(t, s.fs.Remove(ctx, "/t", true))
	})
}

func TestMoveBetweenFileSystems(t *testing.T) {
	each(t, func(t *testing.T, s service) {
		must(t, os.Mkdir(s.host("/mnt"), 0o755))
		must(t, unix.Mount("tmpfs", s.host("/mnt"), "tmpfs", 0, "size=4m"))
		t.Cleanup(func() { _ = unix.Unmount(s.host("/mnt"), unix.MNT_DETACH) })
		put(t, s, "/tree/sub/file", "content")
		must(t, os.Symlink("nowhere", s.host("/tree/link")))
		must(t, s.fs.Move(t.Context(), "/tree", "/mnt/tree"))
		if got := get(t, s, "/mnt/tree/sub/file"); got != "content" {
			t.Errorf("holds %q", got)
		}
		must(t, s.fs.Move(t.Context(), "/mnt/tree/sub/file", "/back"))
		if got := get(t, s, "/back"); got != "content" {
			t.Errorf("holds %q", got)
		}
		onlyNames(t, s.root, "back", "mnt")
		onlyNames(t, s.host("/mnt"), "tree")
		put(t, s, "/big", strings.Repeat("x", 8<<20))
		wantClass(t, s.fs.Move(t.Context(), "/big", "/mnt/big"), dsec.NoSpace)
		onlyNames(t, s.host("/mnt"), "tree")
	})
}

func TestAFileInAClosedDirectoryIsOverwrittenInPlace(t *testing.T) {
	root := newRoot(t)
	openTo(t, root)
	s := service{local(t, root), root}
	put(t, s, "/etc/mine", "a longer old content")
	must(t, os.Chown(s.host("/etc/mine"), 1000, 1000))
	must(t, os.Mkdir(s.host("/tmp"), 0o777))
	must(t, os.Chmod(s.host("/tmp"), 0o777))
	user := asUser(t, root, 1000)
	i, err := user.Write(t.Context(), "/etc/mine", strings.NewReader("new"), WriteOptions{})
	must(t, err)
	if got := get(t, s, "/etc/mine"); got != "new" || i.Size != 3 {
		t.Errorf("holds %q, said %+v", got, i)
	}
	onlyNames(t, s.host("/tmp"))
}

func TestAMountedFileIsOverwrittenInPlace(t *testing.T) {
	each(t, func(t *testing.T, s service) {
		put(t, s, "/hosts", "below")
		src := filepath.Join(t.TempDir(), "hosts")
		must(t, os.WriteFile(src, []byte("old"), 0o644))
		must(t, unix.Mount(src, s.host("/hosts"), "", unix.MS_BIND, ""))
		t.Cleanup(func() { _ = unix.Unmount(s.host("/hosts"), unix.MNT_DETACH) })
		put(t, s, "/hosts", "127.0.0.1 localhost\n")
		if b, _ := os.ReadFile(src); string(b) != "127.0.0.1 localhost\n" {
			t.Errorf("the mounted file holds %q", b)
		}
		onlyNames(t, s.root, "hosts")
	})
}

func TestCancelledCallsEnd(t *testing.T) {
	each(t, func(t *testing.T, s service) {
		ctx, cancel := context.WithCancel(t.Context())
		put(t, s, "/old", "old")
		r, w := io.Pipe()
		defer w.Close()
		go func() {
			_, _ = w.Write([]byte("begin"))
			cancel()
			w.CloseWithError(errors.New("connection reset"))
		}()
		_, err := s.fs.Write(ctx, "/old", r, WriteOptions{})
		wantClass(t, err, dsec.Canceled)
		if got := get(t, s, "/old"); got != "old" {
			t.Errorf("holds %q", got)
		}
		onlyNames(t, s.root, "old")
		late, done := context.WithDeadline(t.Context(), time.Now().Add(-time.Second))
		defer done()
		_, err = s.fs.List(late, "/", 1)
		wantClass(t, err, dsec.Timeout)
	})
}

func TestABrokenSenderLeavesTheOldFile(t *testing.T) {
	each(t, func(t *testing.T, s service) {
		put(t, s, "/f", "old")
		broken := io.MultiReader(noise(100<<10), errReader{io.ErrUnexpectedEOF})
		_, err := s.fs.Write(t.Context(), "/f", broken, WriteOptions{})
		wantClass(t, err, dsec.Canceled, "unexpected EOF")
		if got := get(t, s, "/f"); got != "old" {
			t.Errorf("holds %.20q", got)
		}
		onlyNames(t, s.root, "f")
	})
}

type errReader struct{ err error }

func (e errReader) Read([]byte) (int, error) { return 0, e.err }

func TestListIsRecursiveSortedAndCapped(t *testing.T) {
	each(t, func(t *testing.T, s service) {
		for _, p := range []string{"/d/b/x", "/d/a", "/d/b/c/y"} {
			put(t, s, p, p)
		}
		must(t, os.Symlink("b", s.host("/d/link")))
		all, err := s.fs.List(t.Context(), "/d", 2)
		must(t, err)
		var got []string
		for _, i := range all {
			got = append(got, i.Path+":"+string(i.Kind)+i.Target)
		}
		if want := "/d/a:file /d/b:dir /d/b/c:dir /d/b/x:file /d/link:symlinkb"; strings.Join(got, " ") != want {
			t.Errorf("listed %q", got)
		}
	})
}

func TestListOfTooManyEntriesIsRefused(t *testing.T) {
	root := newRoot(t)
	must(t, unix.Mount("tmpfs", root, "tmpfs", 0, "size=256m,nr_inodes=200000"))
	t.Cleanup(func() { _ = unix.Unmount(root, unix.MNT_DETACH) })
	for n := range maxEntries + 1 {
		must(t, unix.Mknod(filepath.Join(root, fmt.Sprint(n)), unix.S_IFREG|0o644, 0))
	}
	c := connected(t, local(t, root), unix.SOCK_STREAM)
	_, err := c.List(t.Context(), "/", 1)
	wantClass(t, err, dsec.ResourceExhausted, "100000 entries")
	must(t, os.Remove(filepath.Join(root, "7")))
	all, err := c.List(t.Context(), "/", 1)
	if err != nil || len(all) != maxEntries {
		t.Errorf("%d entries, %v", len(all), err)
	}
}

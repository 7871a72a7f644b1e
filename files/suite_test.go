package files

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
)

// serveEnv makes the test binary a helper that serves a directory over fd 3.
const serveEnv = "DSEC_TEST_SERVE"

func TestMain(m *testing.M) {
	if root := os.Getenv(serveEnv); root != "" {
		l, err := NewLocal(root)
		if err != nil {
			panic(err)
		}
		conn, err := net.FileConn(os.NewFile(3, "socket"))
		if err != nil {
			panic(err)
		}
		if err := Serve(context.Background(), conn, l, 0); err != nil {
			panic(err)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// service is a file service under test and the directory that is its root.
type service struct {
	fs   FS
	root string
}

func (s service) host(path string) string { return filepath.Join(s.root, path) }

// each runs a test against Local and against a Client over Serve.
func each(t *testing.T, fn func(t *testing.T, s service)) {
	t.Run("local", func(t *testing.T) {
		root := newRoot(t)
		fn(t, service{local(t, root), root})
	})
	t.Run("client", func(t *testing.T) {
		root := newRoot(t)
		fn(t, service{connected(t, local(t, root), unix.SOCK_STREAM), root})
	})
}

func newRoot(t *testing.T) string {
	root := t.TempDir()
	if err := os.Chmod(root, 0o755); err != nil {
		t.Fatal(err)
	}
	return root
}

func local(t *testing.T, root string) *Local {
	l, err := NewLocal(root)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

func socketPair(t testing.TB, kind int) (a, b net.Conn) {
	fds, err := unix.Socketpair(unix.AF_UNIX, kind|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	conns := make([]net.Conn, 2)
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "socket")
		if conns[i], err = net.FileConn(f); err != nil {
			t.Fatal(err)
		}
		f.Close()
	}
	return conns[0], conns[1]
}

func connected(t *testing.T, fs FS, kind int) *Client {
	a, b := socketPair(t, kind)
	served := make(chan error, 1)
	go func() { served <- Serve(context.Background(), b, fs, 0) }()
	c := NewClient(a)
	t.Cleanup(func() {
		c.Close()
		if err := <-served; err != nil {
			t.Errorf("serve: %v", err)
		}
	})
	return c
}

// asUser starts a helper process with another uid over root.
func asUser(t *testing.T, root string, uid uint32) *Client {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	mine, theirs := os.NewFile(uintptr(fds[0]), "mine"), os.NewFile(uintptr(fds[1]), "theirs")
	self, err := os.Open("/proc/self/exe") // its directory may be closed to others
	if err != nil {
		t.Fatal(err)
	}
	defer self.Close()
	cmd := exec.Command("/proc/self/fd/4")
	cmd.Env = append(os.Environ(), serveEnv+"="+root)
	cmd.Dir, cmd.Stderr = "/", os.Stderr
	cmd.ExtraFiles = []*os.File{theirs, self}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	theirs.Close()
	conn, err := net.FileConn(mine)
	mine.Close()
	if err != nil {
		t.Fatal(err)
	}
	c := NewClient(conn)
	t.Cleanup(func() {
		c.Close()
		_ = cmd.Wait()
	})
	return c
}

// openTo makes every directory up to root passable for others.
func openTo(t *testing.T, root string) {
	for d := root; d != "/" && d != os.TempDir(); d = filepath.Dir(d) {
		if err := os.Chmod(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
}

func wantClass(t *testing.T, err error, class dsec.Class, parts ...string) {
	t.Helper()
	if dsec.ClassOf(err) != class {
		t.Fatalf("error %v has class %q, want %q", err, dsec.ClassOf(err), class)
	}
	for _, p := range parts {
		if !strings.Contains(err.Error(), p) {
			t.Errorf("error %q does not say %q", err, p)
		}
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func put(t *testing.T, s service, path, content string) {
	t.Helper()
	_, err := s.fs.Write(t.Context(), path, strings.NewReader(content), WriteOptions{Parents: true})
	must(t, err)
}

func get(t *testing.T, s service, path string) string {
	t.Helper()
	var b bytes.Buffer
	n, err := s.fs.Read(t.Context(), path, 0, -1, &b)
	must(t, err)
	if n != int64(b.Len()) {
		t.Fatalf("read says %d bytes, wrote %d", n, b.Len())
	}
	return b.String()
}

func ptr[T any](v T) *T { return &v }

// noise is n reproducible bytes.
func noise(n int64) io.Reader {
	return io.LimitReader(rand.NewChaCha8([32]byte{1}), n)
}

func TestD1_UploadsOfEverySizeArrive(t *testing.T) {
	sizes := []int64{0, 1, 17 << 10, 18 << 10, 19 << 10, 64 << 10, 10 << 20}
	if os.Getenv("DSEC_LONG") != "" {
		sizes = append(sizes, 1<<30)
	}
	each(t, func(t *testing.T, s service) {
		for _, n := range sizes {
			want := sha256.New()
			_, _ = io.Copy(want, noise(n))
			digest := hex.EncodeToString(want.Sum(nil))
			i, err := s.fs.Write(t.Context(), "/f", noise(n), WriteOptions{SHA256: digest})
			must(t, err)
			got := sha256.New()
			_, err = s.fs.Read(t.Context(), "/f", 0, -1, got)
			must(t, err)
			if i.Size != n || hex.EncodeToString(got.Sum(nil)) != digest {
				t.Errorf("%d bytes: stat says %d, digests equal: %v", n, i.Size, bytes.Equal(got.Sum(nil), want.Sum(nil)))
			}
		}
	})
}

func TestD3_ParentsMadeOnTheWayGetTheOwner(t *testing.T) {
	each(t, func(t *testing.T, s service) {
		must(t, s.fs.Mkdir(t.Context(), "/data", 0o755, false))
		_, err := s.fs.Write(t.Context(), "/data/a/b/c", strings.NewReader("x"), WriteOptions{Parents: true, UID: ptr(uint32(1000)), GID: ptr(uint32(1001))})
		must(t, err)
		for _, p := range []string{"/data/a", "/data/a/b", "/data/a/b/c"} {
			i, err := s.fs.Stat(t.Context(), p, false)
			must(t, err)
			if i.UID != 1000 || i.GID != 1001 {
				t.Errorf("%s belongs to %d:%d", p, i.UID, i.GID)
			}
		}
		if i, _ := s.fs.Stat(t.Context(), "/data", false); i.UID != 0 {
			t.Errorf("/data, which existed, was given to %d", i.UID)
		}
	})
}

func TestD5_ListFollowsALinkToADirectory(t *testing.T) {
	each(t, func(t *testing.T, s service) {
		put(t, s, "/etc/passwd", "root:x:0:0::/:/bin/sh\n")
		put(t, s, "/etc/hosts", "")
		must(t, os.Symlink("/etc", s.host("/x")))
		all, err := s.fs.List(t.Context(), "/x", 1)
		must(t, err)
		if len(all) != 2 || all[0].Path != "/x/hosts" || all[1].Path != "/x/passwd" || all[1].Owner != "root" {
			t.Errorf("listed %+v", all)
		}
	})
}

func TestD8_FiftyUploadsIntoOneNewDirectory(t *testing.T) {
	each(t, func(t *testing.T, s service) {
		var wg sync.WaitGroup
		for n := range 50 {
			wg.Go(func() {
				_, err := s.fs.Write(t.Context(), fmt.Sprintf("/n/e/w/i/%d", n), strings.NewReader(fmt.Sprint(n)), WriteOptions{Parents: true})
				if err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		all, err := s.fs.List(t.Context(), "/n/e/w/i", 1)
		must(t, err)
		if len(all) != 50 {
			t.Errorf("%d files", len(all))
		}
	})
}

func TestD10_ASlowUploadSucceedsWhileBytesMove(t *testing.T) {
	pieces, pause := 8, 50*time.Millisecond
	if os.Getenv("DSEC_LONG") != "" {
		pieces, pause = 900, 100*time.Millisecond
	}
	each(t, func(t *testing.T, s service) {
		r, w := io.Pipe()
		go func() {
			tick := time.NewTicker(pause)
			defer tick.Stop()
			for range pieces {
				<-tick.C
				_, _ = w.Write(make([]byte, 10<<10))
			}
			w.Close()
		}()
		i, err := s.fs.Write(t.Context(), "/slow", r, WriteOptions{})
		must(t, err)
		if i.Size != int64(pieces*10<<10) {
			t.Errorf("size %d", i.Size)
		}
	})
}

func TestD11_StaleContentIsReplacedAndTheHashChecked(t *testing.T) {
	each(t, func(t *testing.T, s service) {
		put(t, s, "/partial", strings.Repeat("stale", 1000))
		sum := sha256.Sum256([]byte("new"))
		_, err := s.fs.Write(t.Context(), "/partial", strings.NewReader("new"), WriteOptions{SHA256: hex.EncodeToString(sum[:])})
		must(t, err)
		if got := get(t, s, "/partial"); got != "new" {
			t.Errorf("content is %.20q", got)
		}
		_, err = s.fs.Write(t.Context(), "/partial", strings.NewReader("other"), WriteOptions{SHA256: hex.EncodeToString(sum[:])})
		wantClass(t, err, dsec.Corrupt, "write file", "/partial", "sha256")
		if got := get(t, s, "/partial"); got != "new" {
			t.Errorf("a refused upload left %q", got)
		}
		onlyNames(t, s.root, "partial")
	})
}

// onlyNames wants exactly these entries, so no temporary ones.
func onlyNames(t *testing.T, dir string, names ...string) {
	t.Helper()
	es, err := os.ReadDir(dir)
	must(t, err)
	var got []string
	for _, e := range es {
		got = append(got, e.Name())
	}
	if strings.Join(got, " ") != strings.Join(names, " ") {
		t.Errorf("%s holds %q, want %q", dir, got, names)
	}
}

func TestD13_AFullDiskIsNoSpaceAndKeepsTheOldContent(t *testing.T) {
	each(t, func(t *testing.T, s service) {
		must(t, unix.Mount("tmpfs", s.root, "tmpfs", 0, "size=1m"))
		t.Cleanup(func() { _ = unix.Unmount(s.root, unix.MNT_DETACH) })
		full := service{local(t, s.root), s.root}
		if _, ok := s.fs.(*Client); ok {
			full.fs = connected(t, full.fs, unix.SOCK_STREAM)
		}
		put(t, full, "/keep", "old")
		_, err := full.fs.Write(t.Context(), "/keep", noise(4<<20), WriteOptions{})
		wantClass(t, err, dsec.NoSpace, "write file", "/keep", "no space left on device")
		if got := get(t, full, "/keep"); got != "old" {
			t.Errorf("content after the error is %.20q", got)
		}
		onlyNames(t, s.root, "keep")
		put(t, full, "/after", "room again")
	})
}

func TestD15_EachMistakeHasItsClass(t *testing.T) {
	each(t, func(t *testing.T, s service) {
		ctx := t.Context()
		put(t, s, "/etc/empty", "")
		put(t, s, "/a file with spaces", "spaced")
		_, err := s.fs.Read(ctx, "/etc", 0, -1, io.Discard)
		wantClass(t, err, dsec.IsADirectory, "read file", "/etc")
		if get(t, s, "/etc/empty") != "" || get(t, s, "/a file with spaces") != "spaced" {
			t.Error("wrong content")
		}
		_, err = s.fs.Read(ctx, "/https:/x/a%C5%82", 0, -1, io.Discard)
		wantClass(t, err, dsec.FileNotFound)
		for _, p := range []string{"/etc", "/etc/", "/", "/etc/."} {
			_, err = s.fs.Write(ctx, p, strings.NewReader("x"), WriteOptions{})
			wantClass(t, err, dsec.IsADirectory, "write file")
		}
		_, err = s.fs.Write(ctx, "/none/x", strings.NewReader("x"), WriteOptions{})
		wantClass(t, err, dsec.FileNotFound)
		_, err = s.fs.Write(ctx, "/etc/empty/x", strings.NewReader("x"), WriteOptions{Parents: true})
		wantClass(t, err, dsec.NotADirectory)
		for _, p := range []string{"relative", "", "/a\x00b", "/" + strings.Repeat("x", 5000)} {
			_, err = s.fs.Stat(ctx, p, true)
			wantClass(t, err, dsec.Invalid)
		}
		_, err = s.fs.List(ctx, "/etc/empty", 1)
		wantClass(t, err, dsec.NotADirectory)
		wantClass(t, s.fs.Remove(ctx, "/etc", false), dsec.IsADirectory)
		wantClass(t, s.fs.Remove(ctx, "/etc/..", true), dsec.Invalid)
		wantClass(t, s.fs.Mkdir(ctx, "/etc", 0o755, false), dsec.FileExists)
		must(t, s.fs.Mkdir(ctx, "/etc", 0o755, true))
		wantClass(t, s.fs.Mkdir(ctx, "/etc/empty", 0o755, true), dsec.FileExists)
		_, err = s.fs.Read(ctx, "/etc/empty", -1, 3, io.Discard)
		wantClass(t, err, dsec.Invalid)
	})
}

func TestD15_AnotherUserIsDenied(t *testing.T) {
	root := newRoot(t)
	openTo(t, root)
	s := service{local(t, root), root}
	put(t, s, "/closed/secret", "s")
	must(t, os.Chmod(s.host("/closed/secret"), 0o600))
	must(t, os.Mkdir(s.host("/shut"), 0o700))
	user := asUser(t, root, 1000)
	_, err := user.Read(t.Context(), "/closed/secret", 0, -1, io.Discard)
	wantClass(t, err, dsec.PermissionDenied, "read file", "/closed/secret")
	_, err = user.Stat(t.Context(), "/shut/x", true)
	wantClass(t, err, dsec.PermissionDenied)
	_, err = user.Write(t.Context(), "/closed/new", strings.NewReader("x"), WriteOptions{})
	wantClass(t, err, dsec.PermissionDenied)
	_, err = user.Write(t.Context(), "/closed/secret", strings.NewReader("x"), WriteOptions{})
	wantClass(t, err, dsec.PermissionDenied)
	wantClass(t, user.Remove(t.Context(), "/closed", true), dsec.PermissionDenied)
	wantClass(t, user.SetAttr(t.Context(), "/closed", Attr{Mode: ptr(uint32(0o777))}), dsec.PermissionDenied)
	wantClass(t, user.Mkdir(t.Context(), "/closed/d", 0o755, true), dsec.PermissionDenied)
}

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

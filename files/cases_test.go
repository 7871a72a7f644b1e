package files

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
)

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

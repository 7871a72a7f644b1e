package bucket

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob"
)

func testDir(t *testing.T) *dir {
	t.Helper()
	s, err := openDir(t.Context(), filepath.Join(t.TempDir(), "a", "b"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s.(*dir)
}

func put(t *testing.T, s blob.Store, key, body string) error {
	t.Helper()
	return blob.PutBytes(t.Context(), s, key, []byte(body), blob.PutOptions{})
}

func TestOnlyObjectsAreInTheDirectory(t *testing.T) {
	d := testDir(t)
	for _, k := range []string{"x", "x", "y/z"} {
		if err := put(t, d, k, "1"); err != nil {
			t.Fatal(err)
		}
	}
	var names []string
	if err := filepath.WalkDir(d.path, func(p string, e fs.DirEntry, err error) error {
		st, _ := e.Info()
		if st.Mode().Perm()&0o077 != 0 {
			t.Errorf("%s has mode %v", p, st.Mode())
		}
		if !e.IsDir() {
			names = append(names, strings.TrimPrefix(p, d.path))
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	if strings.Join(names, " ") != "/x /y/z" {
		t.Errorf("files %v", names)
	}
}

// What somebody else put there is no object and leads nowhere.
func TestForeignThings(t *testing.T) {
	d := testDir(t)
	outside := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(outside, []byte("secret"), 0o600); err != nil {
		t.Fatal(err)
	}
	in := func(name string) string { return filepath.Join(d.path, name) }
	if err := errors.Join(os.Symlink(outside, in("link")), os.Symlink("/", in("up")), syscall.Mkfifo(in("pipe"), 0o600), os.Mkdir(in("dir"), 0o700),
		os.WriteFile(in(".hidden"), nil, 0o600), os.WriteFile(in("not a key"), nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("loop", in("loop")); err != nil {
		t.Fatal(err)
	}
	for _, k := range []string{"link", "up" + outside, "pipe", "dir", "loop"} {
		r, err := d.Open(t.Context(), k, 0, -1)
		if err == nil {
			r.Close()
		}
		if dsec.ClassOf(err) != dsec.NotFound {
			t.Errorf("open %s: %v", k, err)
		}
		if _, err := d.Stat(t.Context(), k); dsec.ClassOf(err) != dsec.NotFound {
			t.Errorf("stat %s: %v", k, err)
		}
	}
	if err := put(t, d, "up/tmp/x", "x"); err == nil {
		t.Error("written outside")
	}
	if err := d.Delete(t.Context(), "dir"); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(in("dir")); err != nil {
		t.Errorf("a directory was deleted: %v", err)
	}
}

func TestAKeyBelowAnother(t *testing.T) {
	d := testDir(t)
	if err := put(t, d, "a", "x"); err != nil {
		t.Fatal(err)
	}
	if err := put(t, d, "a/b", "x"); !errors.Is(err, dsec.Conflict.Err()) {
		t.Errorf("below a file: %v", err)
	}
	if _, err := d.Open(t.Context(), "a/b", 0, -1); !errors.Is(err, dsec.NotFound.Err()) {
		t.Errorf("open below a file: %v", err)
	}
	if err := put(t, d, "c/d", "x"); err != nil {
		t.Fatal(err)
	}
	if err := put(t, d, "c", "x"); err == nil {
		t.Error("a directory was replaced")
	}
	if err := d.Delete(t.Context(), "a/b"); err != nil {
		t.Errorf("delete below a file: %v", err)
	}
}

// Where a rename that does not replace is missing, as on NFS, a link does it.
func TestIfAbsentByLink(t *testing.T) {
	d := testDir(t)
	var won atomic.Int32
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			name := aside + "/" + dsec.Random(10)
			f, err := d.create(name)
			if err != nil {
				t.Error(err)
				return
			}
			defer d.giveUp(f, name)
			err = d.byLink(f, name, "k")
			if err == nil {
				won.Add(1)
			} else if !errors.Is(err, dsec.AlreadyExists.Err()) {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if won.Load() != 1 {
		t.Errorf("%d won", won.Load())
	}
	// The answer to a link that worked was lost, and it is asked for again.
	f, err := d.create(aside + "/twice")
	if err != nil {
		t.Fatal(err)
	}
	defer d.giveUp(f, aside+"/twice")
	if err := errors.Join(d.byLink(f, aside+"/twice", "l"), d.byLink(f, aside+"/twice", "l")); err != nil {
		t.Errorf("asked for twice: %v", err)
	}
}

// A file system that does not answer keeps nobody, and what comes late is
// cleaned up.
func TestWhatDoesNotAnswerIsLeftBehind(t *testing.T) {
	d := testDir(t)
	ctx, cancel := context.WithCancel(t.Context())
	answer, dropped := make(chan struct{}), make(chan int, 1)
	begun := make(chan struct{})
	go func() { <-begun; cancel() }()
	_, err := await(ctx, d, func() (int, error) { close(begun); <-answer; return 7, nil }, func(v int) { dropped <- v })
	if !errors.Is(err, context.Canceled) {
		t.Errorf("left with %v", err)
	}
	close(answer)
	if v := <-dropped; v != 7 {
		t.Errorf("dropped %d", v)
	}
}

func TestOnlySoManyAreLeftBehind(t *testing.T) {
	d := testDir(t)
	answer := make(chan struct{})
	for range leftBehind {
		ctx, cancel := context.WithCancel(t.Context())
		begun := make(chan struct{})
		go func() { <-begun; cancel() }()
		if _, err := await(ctx, d, func() (int, error) { close(begun); <-answer; return 0, nil }, ignore); err == nil {
			t.Fatal("it answered")
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	go func() { // nothing is begun, so that only the end of the context ends it
		for len(d.hands) < leftBehind {
		}
		cancel()
	}()
	if err := blob.PutBytes(ctx, d, "k", nil, blob.PutOptions{}); !errors.Is(err, dsec.Canceled.Err()) {
		t.Errorf("one more: %v", err)
	}
	close(answer)
	if err := put(t, d, "k", "x"); err != nil {
		t.Errorf("when it answers again: %v", err)
	}
}

func TestAMountThatIsAwayIsNoEmptyStore(t *testing.T) {
	for errno, want := range map[syscall.Errno]dsec.Class{syscall.EIO: dsec.Unavailable, syscall.ESTALE: dsec.Unavailable, syscall.ENOTCONN: dsec.Unavailable,
		syscall.EROFS: dsec.PermissionDenied, syscall.EACCES: dsec.PermissionDenied, syscall.ENOSPC: dsec.NoSpace, syscall.EDQUOT: dsec.NoSpace,
		syscall.ENOENT: dsec.NotFound} {
		err := classify(readOp, "k", withoutPath(&fs.PathError{Op: "open", Path: "/x", Err: errno}))
		if dsec.ClassOf(err) != want || strings.Contains(err.Error(), "/x") {
			t.Errorf("%v: %v is %s", errno, err, dsec.ClassOf(err))
		}
	}
}

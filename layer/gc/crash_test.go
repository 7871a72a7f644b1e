package gc_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob"
	"github.com/opendsec/dsec/blob/bucket"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/layer/gc"
	"github.com/opendsec/dsec/layer/store"
)

const (
	crashDir  = "DSEC_TEST_CRASH_DIR" // what the child works on
	crashAt   = "DSEC_TEST_CRASH_AT"  // the call at which it kills itself
	crashWork = "DSEC_TEST_CRASH_WORK"
)

func TestMain(m *testing.M) {
	if dir := os.Getenv(crashDir); dir != "" {
		if err := crash(dir, os.Getenv(crashWork)); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// crash works until the call at which it is killed, if it comes to that.
func crash(dir, work string) error {
	at, err := strconv.Atoi(os.Getenv(crashAt))
	if err != nil {
		return err
	}
	ctx := context.Background()
	b, err := bucket.Open(ctx, "file://"+filepath.Join(dir, "blobs"))
	if err != nil {
		return err
	}
	blobs := &killing{Store: b, at: at}
	if work == "collect" {
		_, err := gc.Collect(ctx, blobs, hasty(true))
		return err
	}
	s, err := store.Open(filepath.Join(dir, "pusher"), store.Options{Blobs: blobs, Log: quiet})
	if err != nil {
		return err
	}
	if err := s.Renew(ctx); err != nil {
		return err
	}
	if _, err = importTree(ctx, s, filepath.Join(dir, "source"), "pushed"); err != nil {
		return err
	}
	return s.Renew(ctx)
}

// killing kills this process at a call: before it is made, and where something
// is changed also when it has been made and nobody has seen the answer.
type killing struct {
	blob.Store
	at int
	n  atomic.Int64
}

func (k *killing) count() {
	if k.n.Add(1)-1 == int64(k.at) {
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {}
	}
}

func (k *killing) Open(ctx context.Context, key string, off, n int64) (io.ReadCloser, error) {
	k.count()
	return k.Store.Open(ctx, key, off, n)
}

func (k *killing) Put(ctx context.Context, key string, r io.Reader, o blob.PutOptions) error {
	k.count()
	err := k.Store.Put(ctx, key, r, o)
	k.count()
	return err
}

func (k *killing) Stat(ctx context.Context, key string) (blob.Info, error) {
	k.count()
	return k.Store.Stat(ctx, key)
}

func (k *killing) Delete(ctx context.Context, key string) error {
	k.count()
	err := k.Store.Delete(ctx, key)
	k.count()
	return err
}

func (k *killing) List(ctx context.Context, prefix string) iter.Seq2[blob.Info, error] {
	k.count()
	return k.Store.List(ctx, prefix)
}

// start runs work in a process that is killed at a call; false when it ended
// before that.
func start(t *testing.T, dir, work string, at int) (killed bool) {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), crashDir+"="+dir, crashAt+"="+strconv.Itoa(at), crashWork+"="+work)
	out, err := cmd.CombinedOutput()
	if err == nil {
		return false
	}
	e, ok := errors.AsType[*exec.ExitError](err)
	if !ok || e.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
		t.Fatalf("%s killed at %d: %v: %s", work, at, err, out)
	}
	return true
}

// outlive lets twenty minutes pass: what a killed run has written is that old now.
func outlive(t *testing.T, dir string, blobs blob.Store) {
	t.Helper()
	old := time.Now().Add(-2 * layer.RunDead)
	for _, key := range keys(t, blobs, layer.RunPrefix) {
		if err := os.Chtimes(filepath.Join(dir, "blobs", key), old, old); err != nil {
			t.Fatal(err)
		}
	}
}

// scene is a store with a layer that is kept and one that is not, and was
// condemned or not yet.
func scene(t *testing.T, condemned bool) (dir string, blobs blob.Store, kept map[layer.Digest]bool) {
	t.Helper()
	ctx, dir := context.Background(), t.TempDir()
	blobs = openBucket(t, filepath.Join(dir, "blobs"))
	s := openNode(t, filepath.Join(dir, "node"), blobs)
	one, err := importTree(ctx, s, tree(t, 1, 1, 2, 3), "one")
	if err == nil {
		_, err = importTree(ctx, s, tree(t, 2, 2, 3, 4), "two")
	}
	for _, weak := range []string{"traces/" + layer.DigestOf([]byte("x")).Hex(), "claims/x/1"} {
		err = errors.Join(err, blob.PutBytes(ctx, blobs, weak, []byte("x"), blob.PutOptions{}))
	}
	if err = errors.Join(err, s.Remove(ctx, "two"), s.Renew(ctx)); err != nil {
		t.Fatal(err)
	}
	if condemned {
		collect(t, blobs)
	}
	return dir, blobs, map[layer.Digest]bool{one: true}
}

// TestKillACollectorAnywhere: killed at any of its calls, it leaves a store in
// which all that is kept is whole, and the next one finishes.
func TestKillACollectorAnywhere(t *testing.T) {
	for what, condemned := range map[string]bool{"condemning": false, "deleting": true} {
		t.Run(what, func(t *testing.T) { killCollector(t, condemned) })
	}
}

// every is how many calls are between those at which a process is killed: in
// long tests none.
func every() int {
	if os.Getenv("DSEC_LONG") != "" {
		return 1
	}
	return 4
}

func killCollector(t *testing.T, condemned bool) {
	killed := 0
	for at := 0; ; at += every() {
		dir, blobs, kept := scene(t, condemned)
		if !start(t, dir, "collect", at) {
			break
		}
		killed++
		fetchable(t, blobs, kept)
		if _, err := gc.Collect(context.Background(), blobs, hasty(true)); len(keys(t, blobs, layer.RunPrefix)) > 0 && !errors.Is(err, dsec.Unavailable.Err()) {
			t.Errorf("killed at %d: another one while it may be alive: %v", at, err)
		}
		outlive(t, dir, blobs)
		for range 3 {
			collect(t, blobs)
		}
		fetchable(t, blobs, kept)
		if left := keys(t, blobs, "gc/"); len(left) > 0 {
			t.Errorf("killed at %d: left %v", at, left)
		}
		for _, kind := range []string{"manifests/", "indexes/", "meta/"} {
			if left := keys(t, blobs, kind); len(left) != 1 {
				t.Errorf("killed at %d: left %v", at, left)
			}
		}
		if t.Failed() {
			return
		}
	}
	if killed < 15/every() {
		t.Errorf("killed %d times", killed)
	}
}

// TestKillAPusherAnywhere: what a killed push leaves is collected, or is the
// beginning of the next push.
func TestKillAPusherAnywhere(t *testing.T) {
	killed := 0
	for at := 0; ; at += every() {
		dir, blobs, kept := scene(t, true)
		if err := os.CopyFS(filepath.Join(dir, "source"), os.DirFS(tree(t, 9, 1, 4, 5))); err != nil {
			t.Fatal(err)
		}
		if !start(t, dir, "push", at) {
			break
		}
		killed++
		for range 2 {
			collect(t, blobs)
		}
		fetchable(t, blobs, kept)
		s := openNode(t, filepath.Join(dir, "pusher"), blobs)
		err := s.Renew(context.Background())
		for range 2 {
			collect(t, blobs)
		}
		d, perr := importTree(context.Background(), s, filepath.Join(dir, "source"), "pushed")
		if err = errors.Join(err, perr, s.Renew(context.Background())); err != nil {
			t.Fatalf("killed at %d: %v", at, err)
		}
		for range 2 {
			collect(t, blobs)
		}
		kept[d] = true
		fetchable(t, blobs, kept)
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		if t.Failed() {
			return
		}
	}
	if killed < 30/every() {
		t.Errorf("killed %d times", killed)
	}
}

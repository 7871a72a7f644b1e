package gc_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob"
	"github.com/opendsec/dsec/blob/bucket"
	"github.com/opendsec/dsec/blob/retry"
	"github.com/opendsec/dsec/blob/s3test"
	"github.com/opendsec/dsec/image"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/layer/gc"
)

// stores are what the concurrency test runs on.
func stores(t *testing.T) map[string]func(t *testing.T) blob.Store {
	return map[string]func(t *testing.T) blob.Store{
		"files": func(t *testing.T) blob.Store { return openBucket(t, t.TempDir()) },
		"s3": func(t *testing.T) blob.Store {
			b, err := bucket.Open(context.Background(), s3test.Start(t).URL("gc"))
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { b.Close() })
			return retry.New(b, retry.Policy{}) // a busy server may refuse now and then
		},
	}
}

// TestPushesBesideCollections: machines push, fetch and forget layers that share
// chunks while one collects without a pause.
func TestPushesBesideCollections(t *testing.T) {
	for name, open := range stores(t) {
		t.Run(name, func(t *testing.T) { besides(t, open(t)) })
	}
}

func besides(t *testing.T, blobs blob.Store) {
	ctx, stop := context.WithCancel(context.Background())
	var deleted int64
	done := make(chan error, 1)
	go func() {
		for ctx.Err() == nil {
			r, err := gc.Collect(context.Background(), blobs, hasty(true))
			if err != nil && dsec.ClassOf(err) != dsec.IllegalState {
				done <- err
				return
			}
			for _, row := range r.Rows[:6] {
				deleted += row.Delete.Objects
			}
		}
		done <- nil
	}()
	var mu sync.Mutex
	kept := map[layer.Digest]bool{}
	var wg sync.WaitGroup
	for n := range 3 {
		s := openNode(t, t.TempDir(), blobs)
		dirs := []string{tree(t, 10*n, 1, 2), tree(t, 10*n+1, 2, 3), tree(t, 99, 1, 3)} // the last is of all
		wg.Go(func() {
			for i := range 12 {
				info, err := s.Import(context.Background(), dirs[i%3], "tag", image.Options{})
				for tries := 0; dsec.ClassOf(err) == dsec.Unavailable && tries < 10; tries++ { // collected as fast as it was pushed: the caller's to repeat
					info, err = s.Import(context.Background(), dirs[i%3], "tag", image.Options{})
				}
				if err == nil {
					err = s.Renew(context.Background())
				}
				if err == nil && i < 11 {
					err = s.Remove(context.Background(), "tag")
				}
				if err == nil {
					err = s.Renew(context.Background())
				}
				if err != nil {
					t.Errorf("node %d: %v", n, err)
					return
				}
				if i == 11 {
					mu.Lock()
					kept[info.Digest] = true
					mu.Unlock()
				}
			}
		})
	}
	wg.Wait()
	stop()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if deleted == 0 {
		t.Error("nothing was deleted: the test shows nothing")
	}
	fetchable(t, blobs, kept)
	c, err := gc.Verify(context.Background(), blobs, gc.VerifyOptions{})
	if err != nil || len(c.Damaged) > 0 {
		t.Errorf("%v %+v", err, c.Damaged)
	}
}

// TestAPushWaitsForARunThatIsAlive: while a run removes what a push needs the push
// waits, however long; a run that is dead it ignores.
func TestAPushWaitsForARunThatIsAlive(t *testing.T) {
	ctx, dir := context.Background(), t.TempDir()
	blobs := openBucket(t, dir)
	src := tree(t, 1, 1, 2)
	s := openNode(t, t.TempDir(), blobs)
	d, err := importTree(ctx, s, src, "tag")
	if err == nil {
		err = s.Renew(ctx)
	}
	if err != nil {
		t.Fatal(err)
	}
	put(t, blobs, layer.CondemnedPrefix+"c", string(layer.NewCondemned([]string{layer.ManifestKey(d)}).Encode()))
	put(t, blobs, layer.RunPrefix+"r", string(layer.NewRun("test", []string{"c"}).Encode()))
	short, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
	defer cancel()
	if _, err := importTree(short, openNode(t, t.TempDir(), blobs), src, "tag"); !errors.Is(err, dsec.Timeout.Err()) {
		t.Errorf("beside a live run: %v", err)
	}
	if err := blobs.Delete(ctx, layer.CondemnedPrefix+"c"); err != nil { // executed
		t.Fatal(err)
	}
	if _, err := importTree(ctx, openNode(t, t.TempDir(), blobs), src, "tag"); err != nil {
		t.Errorf("executed: %v", err)
	}
	put(t, blobs, layer.CondemnedPrefix+"c", string(layer.NewCondemned([]string{layer.ManifestKey(d)}).Encode()))
	old := time.Now().Add(-layer.RunDead - time.Minute)
	if err := os.Chtimes(filepath.Join(dir, layer.RunPrefix, "r"), old, old); err != nil {
		t.Fatal(err)
	}
	if _, err := importTree(ctx, openNode(t, t.TempDir(), blobs), src, "tag"); err != nil {
		t.Errorf("beside a dead run: %v", err)
	}
}

package gc_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/layer/gc"
)

// late is a store that carries writes out once more, later: as one does of which
// the answer was lost, or the caller had gone.
type late struct {
	blob.Store
	prefix string

	mu    sync.Mutex
	lost  bool // writes are only carried out later
	later []func() error
}

func (l *late) Put(ctx context.Context, key string, r io.Reader, o blob.PutOptions) error {
	if !strings.HasPrefix(key, l.prefix) {
		return l.Store.Put(ctx, key, r, o)
	}
	b, err := io.ReadAll(r)
	if err != nil {
		return err
	}
	put := func() error { return l.Store.Put(context.WithoutCancel(ctx), key, bytes.NewReader(b), o) }
	l.mu.Lock()
	defer l.mu.Unlock()
	l.later = append(l.later, put)
	if l.lost {
		return dsec.E(dsec.Timeout, "write object", key, context.DeadlineExceeded)
	}
	return put()
}

// land carries out the n oldest of what was to come, the oldest last.
func (l *late) land(n int) (err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, put := range slices.Backward(l.later[:n]) {
		err = errors.Join(err, put())
	}
	return err
}

// lose begins or ends to lose writes, and forgets those of before.
func (l *late) lose(lost bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lost = lost
	if lost {
		l.later = nil
	}
}

// TestALateRootTakesNothingBack: a root that was given up and is written after
// the next one all the same does not replace that one.
func TestALateRootTakesNothingBack(t *testing.T) {
	ctx := context.Background()
	blobs := &late{Store: openBucket(t, t.TempDir()), prefix: layer.RootPrefix}
	s, other := openNode(t, t.TempDir(), blobs), openNode(t, t.TempDir(), blobs)
	_, err := importTree(ctx, other, tree(t, 2, 2), "tag")
	if err = errors.Join(err, other.Renew(ctx), s.Renew(ctx)); err != nil {
		t.Fatal(err)
	}
	blobs.lose(true)
	if err := s.Renew(ctx); dsec.ClassOf(err) != dsec.Timeout {
		t.Fatalf("renewed: %v", err)
	}
	blobs.lose(false)
	d, err := importTree(ctx, s, tree(t, 1, 1), "tag")
	if err = errors.Join(err, s.Renew(ctx)); err != nil {
		t.Fatal(err)
	}
	if err := blobs.land(1); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		collect(t, blobs)
	}
	fetchable(t, blobs, map[layer.Digest]bool{d: true})
	if err := s.Renew(ctx); err != nil {
		t.Fatal(err)
	}
	if left := keys(t, blobs, layer.RootPrefix); len(left) != 2 {
		t.Errorf("roots left: %v", left)
	}
}

// TestALatePinTakesNothingBack: a push says what it relies on bit by bit; the
// first of it written once more leaves the rest said.
func TestALatePinTakesNothingBack(t *testing.T) {
	ctx := context.Background()
	blobs := &late{Store: openBucket(t, t.TempDir()), prefix: layer.RootPrefix}
	s := openNode(t, t.TempDir(), blobs)
	if _, err := importTree(ctx, s, tree(t, 1, 1), "tag"); err != nil {
		t.Fatal(err)
	}
	if err := blobs.land(len(blobs.later)); err != nil {
		t.Fatal(err)
	}
	said := map[string]bool{}
	for _, key := range keys(t, blobs, layer.RootPrefix) {
		b, err := blob.ReadAll(ctx, blobs, key, layer.MaxRoot)
		if err != nil {
			t.Fatal(err)
		}
		root, err := layer.DecodeRoot(b, key)
		if err != nil {
			t.Fatal(err)
		}
		for _, kept := range root.Keep {
			said[kept] = true
		}
	}
	for _, kind := range []string{"manifests/", "indexes/", "meta/", "packs/"} {
		for _, key := range keys(t, blobs, kind) {
			if !said[key] {
				t.Errorf("%s is not announced", key)
			}
		}
	}
}

// TestALateRunHidesNothing: whatever of a run is written once more while it
// deletes, who looks sees all that it removes.
func TestALateRunHidesNothing(t *testing.T) {
	ctx := context.Background()
	blobs := &late{Store: openBucket(t, t.TempDir()), prefix: layer.RunPrefix}
	s := openNode(t, t.TempDir(), blobs)
	one, err := importTree(ctx, s, tree(t, 1, 1), "one")
	if err == nil {
		_, err = importTree(ctx, s, tree(t, 2, 2), "two")
	}
	if err = errors.Join(err, s.Remove(ctx, "two"), s.Renew(ctx)); err != nil {
		t.Fatal(err)
	}
	collect(t, blobs.Store)
	removed := map[string]bool{}
	_, err = gc.Collect(ctx, &hooked{blobs, func(op, key string) {
		if op != "list" || key != layer.RootPrefix {
			return
		}
		if err := blobs.land(2); err != nil {
			t.Error(err)
		}
		for _, key := range keys(t, blobs, layer.RunPrefix) {
			b, err := blob.ReadAll(ctx, blobs, key, layer.MaxRun)
			if err != nil {
				t.Error(err)
			}
			run, err := layer.DecodeRun(b, key)
			if err != nil {
				t.Error(err)
			}
			for _, name := range run.Removes {
				removed[layer.CondemnedPrefix+name] = true
			}
		}
	}}, hasty(true))
	if err != nil {
		t.Fatal(err)
	}
	if len(removed) == 0 {
		t.Error("nobody can see what the run removes")
	}
	if left := keys(t, blobs, layer.RunPrefix); len(left) != 0 {
		t.Errorf("runs left: %v", left)
	}
	fetchable(t, blobs, map[layer.Digest]bool{one: true})
}

// TestRootsAreReplacedWhileTheyAreRead: a collector that finds a root in a list does
// not find it a moment later, and not in the list what came in its place.
func TestRootsAreReplacedWhileTheyAreRead(t *testing.T) {
	ctx := context.Background()
	blobs := openBucket(t, t.TempDir())
	s, other := openNode(t, t.TempDir(), blobs), openNode(t, t.TempDir(), blobs)
	dir := tree(t, 1, 1)
	d, err := importTree(ctx, s, dir, "one")
	if err = errors.Join(err, s.Remove(ctx, "one"), s.Renew(ctx)); err != nil {
		t.Fatal(err)
	}
	own, _, _ := strings.Cut(strings.TrimPrefix(keys(t, blobs, layer.RootPrefix)[0], layer.RootPrefix), "/")
	_, err = importTree(ctx, other, tree(t, 2, 2), "two") // somebody has to keep something
	if err = errors.Join(err, other.Renew(ctx)); err != nil {
		t.Fatal(err)
	}
	collect(t, blobs) // the layer is condemned
	again, err := importTree(ctx, s, dir, "one")
	if err = errors.Join(err, s.Renew(ctx)); err != nil || again != d {
		t.Fatal(again, err)
	}
	renewed := 0
	_, err = gc.Collect(ctx, &hooked{blobs, func(op, key string) {
		if op == "open" && strings.HasPrefix(key, layer.RootPrefix+own+"/") {
			renewed++
			if err := s.Renew(ctx); err != nil {
				t.Error(err)
			}
		}
	}}, hasty(true))
	if err != nil || renewed == 0 {
		t.Fatal(err, renewed)
	}
	fetchable(t, blobs, map[layer.Digest]bool{d: true})
	if err := s.Renew(ctx); err != nil {
		t.Fatal(err)
	}
	if left := keys(t, blobs, layer.RootPrefix); len(left) != 2 {
		t.Errorf("roots left when nobody collects: %v", left)
	}
}

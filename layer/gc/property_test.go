package gc_test

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/layer/gc"
	"github.com/opendsec/dsec/layer/store"
)

// life is some nodes that make, fetch and forget layers.
type life struct {
	t     *testing.T
	rng   *rand.Rand
	blobs blob.Store
	nodes []*store.Store
	dirs  []string
	made  map[layer.Digest]bool // layers that were ever there
	// has are the layers of each node that it has put there, or fetched, since it
	// has them. One whose push failed is only local.
	has  []map[layer.Digest]bool
	next int
}

func newLife(t *testing.T, seed uint64, blobs blob.Store) *life {
	l := &life{t: t, rng: rand.New(rand.NewPCG(seed, 1)), blobs: blobs, made: map[layer.Digest]bool{}}
	for range 3 {
		l.nodes, l.has = append(l.nodes, openNode(t, t.TempDir(), blobs)), append(l.has, map[layer.Digest]bool{})
	}
	for i := range 8 {
		l.dirs = append(l.dirs, tree(t, i, l.rng.IntN(6), l.rng.IntN(6), l.rng.IntN(6)))
	}
	return l
}

// step does one random thing. What has to wait for a collection that is in its
// middle fails, and nothing is claimed of it.
func (l *life) step(within time.Duration) {
	ctx, cancel := context.WithTimeout(context.Background(), within)
	defer cancel()
	n, what := l.rng.IntN(len(l.nodes)), l.rng.IntN(14)
	s, before := l.nodes[n], l.local(n)
	dir, tag := l.dirs[l.rng.IntN(len(l.dirs))], fmt.Sprint("tag", l.rng.IntN(3))
	var err error
	switch {
	case what < 4:
		var d layer.Digest
		if d, err = importTree(ctx, s, dir, tag); err == nil {
			l.made[d], l.has[n][d] = true, true
		}
	case what < 6:
		l.next++
		lease := fmt.Sprint("lease", l.next%2)
		if err = s.Release(ctx, lease); err == nil && len(l.made) > 0 {
			d := l.any()
			if _, err = s.Acquire(ctx, lease, []dsec.LayerRef{dsec.LayerRef(d)}); err == nil && !before[d] {
				l.has[n][d] = true
			}
		}
	case what < 10:
		if err = s.Untag(ctx, tag); err == nil || dsec.ClassOf(err) == dsec.NotFound {
			_, err = s.Collect(ctx, false)
		}
	default:
		err = s.Renew(ctx)
	}
	here := l.local(n)
	maps.DeleteFunc(l.has[n], func(d layer.Digest, _ bool) bool { return !here[d] })
	switch dsec.ClassOf(err) {
	case "", dsec.NotFound, dsec.Timeout, dsec.Canceled: // a fetch of what is gone, or a wait
	default:
		l.t.Errorf("step %d: %v", what, err)
	}
}

// any is a layer that was once there.
func (l *life) any() layer.Digest {
	least := layer.Digest("")
	skip := l.rng.IntN(len(l.made))
	for range skip + 1 {
		next := layer.Digest("~")
		for d := range l.made {
			if d > least && d < next {
				next = d
			}
		}
		least = next
	}
	return least
}

// local are the layers that a node has.
func (l *life) local(n int) map[layer.Digest]bool {
	all, err := l.nodes[n].List(context.Background())
	if err != nil {
		l.t.Fatal(err)
	}
	here := map[layer.Digest]bool{}
	for _, e := range all {
		here[e.Digest] = true
	}
	return here
}

// kept are the layers that a node has and relies on.
func (l *life) kept() map[layer.Digest]bool {
	kept := map[layer.Digest]bool{}
	for _, has := range l.has {
		maps.Copy(kept, has)
	}
	return kept
}

// TestWhatIsKeptStays: whatever nodes do before, between and in the middle of
// collections that spare nothing for its age, each layer that a node keeps can be
// fetched whole; and when nobody keeps anything, nothing is left.
func TestWhatIsKeptStays(t *testing.T) {
	var deleted atomic.Int64
	t.Cleanup(func() { // when the parallel ones have ended
		if deleted.Load() == 0 {
			t.Error("nothing was ever deleted: the test shows nothing")
		}
	})
	for seed := range uint64(16 / every()) {
		t.Run(fmt.Sprint("seed", seed), func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			blobs := openBucket(t, dir)
			l := newLife(t, seed, blobs)
			for range 10 {
				for range 4 + l.rng.IntN(12) {
					l.step(time.Minute)
				}
				o := hasty(true)
				if l.rng.IntN(2) == 0 {
					o.Grace, o.Wait = time.Hour, time.Hour
					l.age(dir)
				}
				deleted.Add(l.collectInterrupted(o))
				fetchable(t, blobs, l.kept())
				if t.Failed() {
					t.FailNow()
				}
			}
			l.forgetAll()
		})
	}
}

// age makes some of all objects two hours old.
func (l *life) age(dir string) {
	old := time.Now().Add(-2 * time.Hour)
	for _, prefix := range []string{"stacks/", "manifests/", "indexes/", "meta/", "packs/", "hints/", layer.CondemnedPrefix} {
		for _, key := range keys(l.t, l.blobs, prefix) {
			if l.rng.IntN(3) == 0 {
				continue
			}
			if err := os.Chtimes(filepath.Join(dir, key), old, old); err != nil {
				l.t.Fatal(err)
			}
		}
	}
}

// collectInterrupted collects while nodes do things between any two calls.
func (l *life) collectInterrupted(o gc.Options) (deleted int64) {
	var mu sync.Mutex
	busy := &hooked{l.blobs, func(string, string) {
		mu.Lock()
		defer mu.Unlock()
		if l.rng.IntN(12) == 0 {
			l.step(150 * time.Millisecond)
		}
	}}
	r, err := gc.Collect(context.Background(), busy, o)
	if err != nil && dsec.ClassOf(err) != dsec.IllegalState { // nobody has a root yet
		l.t.Fatal(err)
	}
	for _, row := range r.Rows {
		deleted += row.Delete.Objects
	}
	return deleted
}

func (l *life) forgetAll() {
	ctx := context.Background()
	for _, s := range l.nodes {
		tags, err := s.Tags(ctx)
		if err != nil {
			l.t.Fatal(err)
		}
		for tag := range tags {
			err = s.Untag(ctx, tag)
		}
		leases, lerr := s.Leases(ctx)
		for _, name := range leases {
			lerr = s.Release(ctx, name)
		}
		if err != nil || lerr != nil {
			l.t.Fatal(err, lerr)
		}
		if _, err := s.Collect(ctx, false); err != nil {
			l.t.Fatal(err)
		}
		if err := s.Renew(ctx); err != nil {
			l.t.Fatal(err)
		}
	}
	// One node keeps something, so that somebody says what he keeps.
	last, err := importTree(ctx, l.nodes[0], l.dirs[0], "last")
	if err != nil {
		l.t.Fatal(err)
	}
	for range 3 {
		collect(l.t, l.blobs)
	}
	fetchable(l.t, l.blobs, map[layer.Digest]bool{last: true})
	if left := keys(l.t, l.blobs, "manifests/"); len(left) != 1 {
		l.t.Errorf("left: %v", left)
	}
	if left := keys(l.t, l.blobs, "indexes/"); len(left) != 1 {
		l.t.Errorf("left: %v", left)
	}
	if r := collect(l.t, l.blobs); r.Rows[5].All != r.Rows[5].Kept || len(r.Missing) > 0 {
		l.t.Errorf("packs %+v, missing %v", r.Rows[5], r.Missing)
	}
}

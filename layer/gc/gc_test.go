package gc_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/layer/gc"
)

func put(t *testing.T, blobs blob.Store, key, body string) {
	t.Helper()
	if err := blob.PutBytes(context.Background(), blobs, key, []byte(body), blob.PutOptions{}); err != nil {
		t.Fatal(err)
	}
}

// TestDryRunWritesNothing: it says what --delete would do, and does not.
func TestDryRunWritesNothing(t *testing.T) {
	_, blobs, _ := scene(t, true)
	before := keys(t, blobs, "")
	still := &hooked{blobs, func(op, key string) {
		if op == "put" || op == "delete" {
			t.Errorf("%s %s", op, key)
		}
	}}
	dry, err := gc.Collect(context.Background(), still, hasty(false))
	if err != nil {
		t.Fatal(err)
	}
	if after := keys(t, blobs, ""); !reflect.DeepEqual(before, after) {
		t.Errorf("before %v\nafter %v", before, after)
	}
	wet := collect(t, blobs)
	if dry.Deleted || !wet.Deleted || !reflect.DeepEqual(dry.Rows, wet.Rows) || dry.Dead != wet.Dead {
		t.Errorf("dry %+v\nwet %+v", dry, wet)
	}
	if n := wet.Rows[2].Delete.Objects; n != 1 {
		t.Errorf("%d manifests deleted", n)
	}
}

// TestDeadBytesOfLivePacks: what a kept pack has for nobody is counted.
func TestDeadBytesOfLivePacks(t *testing.T) {
	ctx, blobs := context.Background(), openBucket(t, t.TempDir())
	s := openNode(t, t.TempDir(), blobs)
	_, err := importTree(ctx, s, tree(t, 1, 1, 2, 3, 4), "one")
	if err == nil {
		_, err = importTree(ctx, s, tree(t, 2, 2, 3, 4), "two")
	}
	if err == nil {
		err = s.Renew(ctx)
	}
	if err != nil {
		t.Fatal(err)
	}
	if r := collect(t, blobs); r.Dead != 0 {
		t.Errorf("%d bytes dead while both are kept", r.Dead)
	}
	if err := errors.Join(s.Remove(ctx, "one"), s.Renew(ctx)); err != nil {
		t.Fatal(err)
	}
	collect(t, blobs)
	if r := collect(t, blobs); r.Dead < 200<<10 || r.Dead > 300<<10 {
		t.Errorf("%d bytes dead, a file of 200 KiB is in nothing", r.Dead)
	}
}

// TestNothingWithoutRoots: a store in which nobody says what he keeps is left alone.
func TestNothingWithoutRoots(t *testing.T) {
	_, blobs, kept := scene(t, false)
	for _, key := range keys(t, blobs, layer.RootPrefix) {
		if err := blobs.Delete(context.Background(), key); err != nil {
			t.Fatal(err)
		}
	}
	before := keys(t, blobs, "manifests/")
	for range 3 {
		if _, err := gc.Collect(context.Background(), blobs, hasty(true)); !errors.Is(err, dsec.IllegalState.Err()) {
			t.Errorf("got %v", err)
		}
	}
	if after := keys(t, blobs, "manifests/"); !reflect.DeepEqual(before, after) || len(keys(t, blobs, "gc/condemned/"))+len(keys(t, blobs, "gc/runs/")) > 1 {
		t.Errorf("left %v %v", after, keys(t, blobs, "gc/"))
	}
	fetchable(t, blobs, kept)
}

// TestNothingBesideDamage: what a damaged kept object needs is unknown, so
// nothing goes; a root that cannot be read likewise.
func TestNothingBesideDamage(t *testing.T) {
	for _, prefix := range []string{"manifests/", "indexes/", layer.RootPrefix, layer.CondemnedPrefix} {
		dir, blobs, _ := scene(t, true)
		for _, key := range keys(t, blobs, prefix) {
			if err := os.WriteFile(filepath.Join(dir, "blobs", key), []byte("{}"), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		before := len(keys(t, blobs, "packs/"))
		if _, err := gc.Collect(context.Background(), blobs, hasty(true)); !errors.Is(err, dsec.Corrupt.Err()) {
			t.Errorf("%s: %v", prefix, err)
		}
		if after := len(keys(t, blobs, "packs/")); after != before {
			t.Errorf("%s: %d of %d packs left", prefix, after, before)
		}
	}
}

// TestANodeThatWasAway: a root that was not renewed for the expiry counts no
// more, not a moment earlier, and its node puts back what it has when it returns.
func TestANodeThatWasAway(t *testing.T) {
	ctx := context.Background()
	dir, blobs, kept := scene(t, false)
	other := openNode(t, t.TempDir(), blobs)
	if _, err := importTree(ctx, other, tree(t, 7, 5), "other"); err != nil {
		t.Fatal(err)
	}
	if err := other.Renew(ctx); err != nil {
		t.Fatal(err)
	}
	backdate := func(age time.Duration) {
		for _, key := range keys(t, blobs, layer.RootPrefix) {
			b, err := blob.ReadAll(ctx, blobs, key, layer.MaxRoot)
			if err != nil {
				t.Fatal(err)
			}
			if r, err := layer.DecodeRoot(b, key); err == nil && r.Node == "node" {
				if err := os.Chtimes(filepath.Join(dir, "blobs", key), time.Now(), time.Now().Add(-age)); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	backdate(gc.DefaultExpiry - time.Hour)
	collect(t, blobs)
	collect(t, blobs)
	fetchable(t, blobs, kept)
	backdate(gc.DefaultExpiry + time.Hour)
	collect(t, blobs)
	collect(t, blobs)
	if left := keys(t, blobs, "manifests/"); len(left) != 1 {
		t.Errorf("left %v", left)
	}
}

// TestLapsedRootIsRestored: the node finds its root gone and its layers, and
// puts both back.
func TestLapsedRootIsRestored(t *testing.T) {
	ctx := context.Background()
	blobs := openBucket(t, t.TempDir())
	nodeDir := t.TempDir()
	s := openNode(t, nodeDir, blobs)
	d, err := importTree(ctx, s, tree(t, 1, 1, 2), "one")
	text := []byte(`{"version":1,"layers":[{"digest":"` + string(d) + `"}]}` + "\n")
	stack := layer.DigestOf(text)
	err = errors.Join(err, os.MkdirAll(filepath.Join(nodeDir, "stacks", stack.Hex()), 0o700),
		os.WriteFile(filepath.Join(nodeDir, "stacks", stack.Hex(), "stack"), text, 0o600))
	if err == nil {
		err = s.Renew(ctx)
	}
	if err != nil {
		t.Fatal(err)
	}
	for _, key := range keys(t, blobs, "") {
		if err := blobs.Delete(ctx, key); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = openNode(t, nodeDir, blobs)
	if err := s.Renew(ctx); err != nil {
		t.Fatal(err)
	}
	fetchable(t, blobs, map[layer.Digest]bool{d: true})
	collect(t, blobs)
	collect(t, blobs)
	fetchable(t, blobs, map[layer.Digest]bool{d: true})
	if left := keys(t, blobs, "stacks/"); len(left) != 1 || left[0] != layer.KindStack.Key(stack) {
		t.Errorf("stacks left: %v", left)
	}
}

// TestOtherKinds: stacks keep layers; notes, traces, claims and hints do not.
func TestOtherKinds(t *testing.T) {
	_, blobs, kept := scene(t, false)
	var one, two layer.Digest
	for _, key := range keys(t, blobs, "manifests/") {
		if _, d, _ := layer.ParseKey(key); kept[d] {
			one = d
		} else {
			two = d
		}
	}
	stack := func(l layer.Digest) layer.Digest {
		body := fmt.Sprintf(`{"version":1,"layers":[{"digest":"%s"}]}`+"\n", l)
		d := layer.DigestOf([]byte(body))
		put(t, blobs, layer.KindStack.Key(d), body)
		return d
	}
	keepStack, dropStack := stack(two), stack(one)
	put(t, blobs, layer.RootPrefix+"x/y", string(layer.NewRoot("x", time.Minute, []string{layer.KindStack.Key(keepStack)}).Encode()))
	put(t, blobs, "oci/kept", `{"version":1,"layer":"`+string(two)+`"}`)
	put(t, blobs, "oci/gone", `{"version":1,"layer":"`+string(layer.DigestOf([]byte("no")))+`"}`)
	put(t, blobs, "oci/empty", `{"version":1}`)
	put(t, blobs, layer.TraceKey(two), "trace")
	put(t, blobs, "somebody/elses", "x")
	for range 3 {
		if r := collect(t, blobs); r.Unknown.Objects != 1 {
			t.Errorf("unknown: %+v", r.Unknown)
		}
	}
	fetchable(t, blobs, map[layer.Digest]bool{one: true, two: true})
	left := strings.Join(keys(t, blobs, ""), " ")
	for key, there := range map[string]bool{
		layer.KindStack.Key(keepStack): true, layer.KindStack.Key(dropStack): false, "oci/kept": true, "oci/gone": false, "oci/empty": true,
		layer.TraceKey(two): true, layer.TraceKey(layer.DigestOf([]byte("x"))): false, "claims/": false, "somebody/elses": true,
	} {
		if strings.Contains(left, key) != there {
			t.Errorf("%s: there %v, want %v", key, !there, there)
		}
	}
}

// TestPackGoesWhileAPushReliesOnIt: between a push's look at layers alike and
// its announcement of their packs, those are collected. It has to notice.
func TestPackGoesWhileAPushReliesOnIt(t *testing.T) {
	ctx, blobs := context.Background(), openBucket(t, t.TempDir())
	s := openNode(t, t.TempDir(), blobs)
	_, err := importTree(ctx, s, tree(t, 1, 1, 2, 3), "one")
	if err = errors.Join(err, s.Remove(ctx, "one"), s.Renew(ctx)); err != nil {
		t.Fatal(err)
	}
	put(t, blobs, layer.RootPrefix+"x/y", string(layer.NewRoot("x", time.Minute, []string{layer.MetaKey(layer.DigestOf(nil))}).Encode()))
	collect(t, blobs)
	var once sync.Once
	pusher := openNode(t, t.TempDir(), &hooked{blobs, func(op, key string) {
		if op == "put" && strings.HasPrefix(key, "packs/") {
			once.Do(func() {
				if r := collect(t, blobs); r.Rows[5].Delete.Objects != 1 {
					t.Errorf("packs: %+v", r.Rows[5])
				}
			})
		}
	}})
	d, err := importTree(ctx, pusher, tree(t, 2, 2, 3, 4), "two")
	if err != nil {
		t.Fatal(err)
	}
	fetchable(t, blobs, map[layer.Digest]bool{d: true})
}

// TestPackCondemnedBeforeWhatNeedsIt: a pack whose time has come is needed by a
// layer that nobody keeps and whose time has not: somebody may still take that up.
func TestPackCondemnedBeforeWhatNeedsIt(t *testing.T) {
	ctx, dir := context.Background(), t.TempDir()
	blobs := openBucket(t, dir)
	put(t, blobs, layer.RootPrefix+"x/y", string(layer.NewRoot("x", time.Minute, []string{layer.MetaKey(layer.DigestOf(nil))}).Encode()))
	s := openNode(t, t.TempDir(), blobs)
	slow := hasty(true)
	slow.Wait = time.Hour
	forget := func(own int, pool ...int) (string, layer.Digest) {
		src := tree(t, own, pool...)
		d, err := importTree(ctx, s, src, "tag")
		if err = errors.Join(err, s.Remove(ctx, "tag"), s.Renew(ctx)); err != nil {
			t.Fatal(err)
		}
		if _, err := gc.Collect(ctx, blobs, slow); err != nil {
			t.Fatal(err)
		}
		return src, d
	}
	forget(1, 1, 2, 3)
	first := keys(t, blobs, layer.CondemnedPrefix)
	src, two := forget(2, 2, 3, 4)
	if n := len(keys(t, blobs, layer.CondemnedPrefix)); len(first) != 1 || n != 2 {
		t.Fatalf("condemned %v, then %d", first, n)
	}
	old := time.Now().Add(-2 * time.Hour)
	if err := os.Chtimes(filepath.Join(dir, first[0]), old, old); err != nil {
		t.Fatal(err)
	}
	if r, err := gc.Collect(ctx, blobs, slow); err != nil || r.Rows[2].Delete.Objects != 1 || r.Rows[5].Delete.Objects != 0 {
		t.Fatalf("%v %+v", err, r.Rows)
	}
	if d, err := importTree(ctx, s, src, "again"); err != nil || d != two {
		t.Fatal(d, err)
	}
	fetchable(t, blobs, map[layer.Digest]bool{two: true})
	if err := s.Remove(ctx, "again"); err != nil {
		t.Fatal(err)
	}
	if err := s.Renew(ctx); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		collect(t, blobs)
	}
	if left := keys(t, blobs, "packs/"); len(left) > 0 {
		t.Errorf("left %v", left)
	}
}

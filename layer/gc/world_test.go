package gc_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob"
	"github.com/opendsec/dsec/blob/bucket"
	"github.com/opendsec/dsec/image"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/layer/gc"
	"github.com/opendsec/dsec/layer/store"
)

// hasty spares nothing for its age: what is safe is safe because it was
// announced.
func hasty(del bool) gc.Options {
	return gc.Options{Delete: del, Grace: -1, Wait: -1, Owner: "test", Log: quiet}
}

var quiet = slog.New(slog.NewTextHandler(io.Discard, nil))

func openBucket(t testing.TB, dir string) blob.Store {
	t.Helper()
	b, err := bucket.Open(context.Background(), "file://"+dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { b.Close() })
	return b
}

func openNode(t testing.TB, dir string, blobs blob.Store) *store.Store {
	t.Helper()
	s, err := store.Open(dir, store.Options{Blobs: blobs, Grace: time.Nanosecond, Log: quiet, Name: filepath.Base(dir)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

// noise is content that does not compress, the same for the same number.
func noise(n, size int) []byte {
	b := make([]byte, size)
	_, _ = rand.NewChaCha8([32]byte{byte(n), byte(n >> 8)}).Read(b) // never fails
	return b
}

// tree makes a directory of some files of a pool, so that layers share chunks,
// and one of its own.
func tree(t testing.TB, own int, pool ...int) string {
	t.Helper()
	d := t.TempDir()
	for _, n := range pool {
		if err := os.WriteFile(filepath.Join(d, fmt.Sprint("pool", n)), noise(n, 200<<10), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(d, "own"), fmt.Appendf(noise(own, 1000), "%d", own), 0o644); err != nil {
		t.Fatal(err)
	}
	return d
}

func collect(t testing.TB, blobs blob.Store) gc.Report {
	t.Helper()
	r, err := gc.Collect(context.Background(), blobs, hasty(true))
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// keys lists what is there below a prefix.
func keys(t testing.TB, blobs blob.Store, prefix string) (out []string) {
	t.Helper()
	for info, err := range blobs.List(context.Background(), prefix) {
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, info.Key)
	}
	return out
}

// fetchable brings layers to a machine that has nothing, compares every byte,
// and takes back what that machine announced.
func fetchable(t testing.TB, blobs blob.Store, layers map[layer.Digest]bool) {
	t.Helper()
	ctx, before := context.Background(), map[string]bool{}
	for _, key := range keys(t, blobs, layer.RootPrefix) {
		before[key] = true
	}
	dir, err := os.MkdirTemp(t.TempDir(), "check")
	if err != nil {
		t.Fatal(err)
	}
	s, err := store.Open(dir, store.Options{Blobs: blobs, Log: quiet})
	if err != nil {
		t.Fatal(err)
	}
	for d := range layers {
		_, err := s.Acquire(ctx, "check"+d.Hex(), []dsec.LayerRef{dsec.LayerRef(d)})
		if err == nil {
			err = s.Verify(ctx, dsec.LayerRef(d))
		}
		if err != nil {
			t.Errorf("kept layer %s: %v", d, err)
		}
	}
	for _, key := range keys(t, blobs, layer.RootPrefix) {
		if !before[key] {
			err = errors.Join(err, blobs.Delete(ctx, key))
		}
	}
	if err = errors.Join(err, s.Close(), os.RemoveAll(dir)); err != nil {
		t.Fatal(err)
	}
}

// hooked calls before every operation.
type hooked struct {
	blob.Store
	before func(op, key string)
}

func (h *hooked) Open(ctx context.Context, key string, off, n int64) (io.ReadCloser, error) {
	h.before("open", key)
	return h.Store.Open(ctx, key, off, n)
}

func (h *hooked) Put(ctx context.Context, key string, r io.Reader, o blob.PutOptions) error {
	h.before("put", key)
	return h.Store.Put(ctx, key, r, o)
}

func (h *hooked) Stat(ctx context.Context, key string) (blob.Info, error) {
	h.before("stat", key)
	return h.Store.Stat(ctx, key)
}

func (h *hooked) Delete(ctx context.Context, key string) error {
	h.before("delete", key)
	return h.Store.Delete(ctx, key)
}

func (h *hooked) List(ctx context.Context, prefix string) iter.Seq2[blob.Info, error] {
	h.before("list", prefix)
	return h.Store.List(ctx, prefix)
}

func importTree(ctx context.Context, s *store.Store, dir, tag string) (layer.Digest, error) {
	info, err := s.Import(ctx, dir, tag, image.Options{})
	return info.Digest, err
}

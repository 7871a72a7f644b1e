package store

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob"
	"github.com/opendsec/dsec/blob/bucket"
	"github.com/opendsec/dsec/image"
	"github.com/opendsec/dsec/layer"
)

func openBucket(t testing.TB, dir string) blob.Store {
	t.Helper()
	b, err := bucket.Open(context.Background(), "file://"+dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { b.Close() })
	return b
}

// varied is content with a hole, repeats and noise over several chunks.
func varied() string {
	var b bytes.Buffer
	b.WriteString(strings.Repeat("some text that compresses ", 30000))
	b.Write(make([]byte, 2<<20))
	b.WriteString("x")
	b.Write(make([]byte, 300<<10))
	b.WriteString(strings.Repeat("some text that compresses ", 30000))
	return b.String()
}

// TestAnotherMachineFetches: a second store on the same bucket makes a layer
// whole from its digest alone, byte for byte.
func TestAnotherMachineFetches(t *testing.T) {
	ctx, blobs := context.Background(), openBucket(t, t.TempDir())
	one := openStore(t, t.TempDir(), Options{Blobs: blobs})
	two := openStore(t, t.TempDir(), Options{Blobs: blobs})
	for what, files := range map[string]map[string]string{"data": {"a": varied(), "b": "small"}, "no data": {"empty": ""}} {
		info, err := one.Import(ctx, tree(t, files), "", image.Options{})
		if err != nil {
			t.Fatal(err)
		}
		set, err := two.Acquire(ctx, "sb"+what[:2], []dsec.LayerRef{dsec.LayerRef(info.Digest)})
		if err != nil {
			t.Fatal(err)
		}
		if err := two.Verify(ctx, dsec.LayerRef(info.Digest)); err != nil {
			t.Error(err)
		}
		one.mu.Lock()
		first, err := one.localLocked(info.Digest)
		one.mu.Unlock()
		if err != nil {
			t.Fatal(err)
		}
		for _, pair := range [][2]string{{first.Meta, set.Layers[0].Meta}, {first.Data, set.Layers[0].Data}} {
			if pair[0] == "" && pair[1] == "" {
				continue
			}
			a, errA := os.ReadFile(pair[0])
			b, errB := os.ReadFile(pair[1])
			if errA != nil || errB != nil || !bytes.Equal(a, b) {
				t.Errorf("%s: %v %v", what, errA, errB)
			}
		}
	}
	if _, err := two.Acquire(ctx, "none", []dsec.LayerRef{dsec.LayerRef(layer.DigestOf([]byte("no such")))}); !errors.Is(err, dsec.NotFound.Err()) {
		t.Errorf("unknown digest: %v", err)
	}
}

// TestCorruptBlobsAreNeverALayer flips a byte in every object in turn.
func TestCorruptBlobsAreNeverALayer(t *testing.T) {
	ctx, dir := context.Background(), t.TempDir()
	blobs := openBucket(t, dir)
	one := openStore(t, t.TempDir(), Options{Blobs: blobs})
	info, err := one.Import(ctx, tree(t, map[string]string{"a": varied()}), "", image.Options{})
	if err != nil {
		t.Fatal(err)
	}
	two := openStore(t, t.TempDir(), Options{Blobs: blobs})
	tried := 0
	err = filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() || strings.Contains(p, "/hints/") || strings.Contains(p, "/roots/") { // nobody reads those to fetch
			return err
		}
		good, err := os.ReadFile(p)
		if err != nil {
			return err
		}
		for _, bad := range [][]byte{flip(good, len(good)/2), flip(good, len(good)-1), good[:len(good)-1], nil} {
			tried++
			if err := os.WriteFile(p, bad, 0o600); err != nil {
				return err
			}
			_, err := two.Acquire(ctx, "sb", []dsec.LayerRef{dsec.LayerRef(info.Digest)})
			if err == nil {
				t.Errorf("%s: %d of %d bytes: accepted", p, len(bad), len(good))
			} else if !errors.Is(err, dsec.Corrupt.Err()) {
				t.Errorf("%s: %v", p, err)
			}
		}
		return os.WriteFile(p, good, 0o600)
	})
	if err != nil || tried != 16 {
		t.Fatalf("%d tries: %v", tried, err)
	}
	if left, err := os.ReadDir(two.path("tmp")); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
	if _, err := two.Acquire(ctx, "sb", []dsec.LayerRef{dsec.LayerRef(info.Digest)}); err != nil {
		t.Errorf("whole again: %v", err)
	}
}

func flip(b []byte, i int) []byte {
	b = bytes.Clone(b)
	b[i] ^= 0x40
	return b
}

// TestLikeLayersShareChunks: of a layer like one that is there only what differs
// is stored, it can be fetched, and damaged hints cost nothing but room.
func TestLikeLayersShareChunks(t *testing.T) {
	ctx, dir := context.Background(), t.TempDir()
	blobs := openBucket(t, dir)
	one := openStore(t, t.TempDir(), Options{Blobs: blobs})
	noise := make([]byte, 20<<20)
	_, _ = rand.NewChaCha8([32]byte{3}).Read(noise)
	size := func() (n int64) {
		for info, err := range blobs.List(ctx, "packs/") {
			if err != nil {
				t.Fatal(err)
			}
			n += info.Size
		}
		return n
	}
	files := func(first string) map[string]string {
		return map[string]string{"a": first, "lib/1": string(noise[:7<<20]), "lib/2": string(noise[7<<20 : 7<<20+5000]), "lib/3": string(noise[8<<20:])}
	}
	if _, err := one.Import(ctx, tree(t, files("version 1")), "", image.Options{}); err != nil {
		t.Fatal(err)
	}
	before := size()
	info, err := one.Import(ctx, tree(t, files(strings.Repeat("version 2", 3000))), "", image.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if more := size() - before; more > 1<<20 {
		t.Errorf("a layer that differs in one small file brings %d bytes of %d", more, before)
	}
	two := openStore(t, t.TempDir(), Options{Blobs: blobs})
	if _, err := two.Acquire(ctx, "sb", []dsec.LayerRef{dsec.LayerRef(info.Digest)}); err != nil {
		t.Fatal(err)
	}
	if err := two.Verify(ctx, dsec.LayerRef(info.Digest)); err != nil {
		t.Error(err)
	}
	for info, err := range blobs.List(ctx, "hints/") {
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, info.Key), []byte("sha256:../../etc/passwd"), 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if _, err := one.Import(ctx, tree(t, files("version 3")), "", image.Options{}); err != nil {
		t.Errorf("with damaged hints: %v", err)
	}
}

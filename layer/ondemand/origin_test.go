package ondemand

import (
	"bytes"
	"context"
	"crypto/sha256"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/klauspost/compress/zstd"

	"github.com/opendsec/dsec/blob"
	"github.com/opendsec/dsec/blob/bucket"
	"github.com/opendsec/dsec/blob/fault"
	"github.com/opendsec/dsec/layer"
)

// origin has the chunks of a layer in one pack of a store that can be broken.
type origin struct {
	plain [][]byte
	ix    layer.Index
	store *fault.Store
}

// newOrigin packs chunks; gap bytes of nobody are before each.
func newOrigin(t testing.TB, gap int, chunks ...[]byte) *origin {
	t.Helper()
	z, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := decoder(); err != nil {
		t.Fatal(err)
	}
	o := &origin{plain: chunks}
	var pack []byte
	known := map[[32]byte]layer.Chunk{}
	for _, p := range chunks {
		c := layer.Chunk{Sum: sha256.Sum256(p), Size: uint32(len(p))}
		if k, ok := known[c.Sum]; ok {
			c = k
		} else if !bytes.Equal(p, nothing[:len(p)]) {
			pack = append(pack, make([]byte, gap)...)
			frame := z.EncodeAll(p, nil)
			c.Off, c.Length = uint64(len(pack)), uint32(len(frame))
			pack = append(pack, frame...)
		}
		known[c.Sum] = c
		o.ix.Chunks = append(o.ix.Chunks, c)
	}
	o.ix.Packs = []layer.Digest{layer.DigestOf(pack)}
	b, err := bucket.Open(context.Background(), "mem://")
	if err != nil {
		t.Fatal(err)
	}
	o.store = fault.New(b)
	if err := blob.PutBytes(context.Background(), o.store, o.key(), pack, blob.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	return o
}

func (o *origin) key() string { return layer.PackKey(o.ix.Packs[0]) }

// open makes a layer that has nothing.
func (o *origin) open(t testing.TB, opts Options) *Layer {
	t.Helper()
	dir := t.TempDir()
	if err := layer.CreatePresence(filepath.Join(dir, "present"), len(o.ix.Chunks)); err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(filepath.Join(dir, "present"), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	present, err := layer.OpenPresence(f, len(o.ix.Chunks))
	if err != nil {
		t.Fatal(err)
	}
	data, err := os.Create(filepath.Join(dir, "data"))
	if err != nil {
		t.Fatal(err)
	}
	if err := data.Truncate(o.ix.Size()); err != nil {
		t.Fatal(err)
	}
	if opts.Blobs == nil {
		opts.Blobs = o.store
	}
	l, err := Open(Parts{Digest: layer.DigestOf(nil), Index: o.ix, Data: data, Present: present}, opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	return l
}

// check reads chunks and compares.
func (o *origin) check(t *testing.T, l *Layer, from, to int) {
	t.Helper()
	for i := from; i < to; i++ {
		b := make([]byte, len(o.plain[i]))
		if _, err := l.ReadAt(context.Background(), b, l.offs[i]); err != nil || !bytes.Equal(b, o.plain[i]) {
			t.Errorf("chunk %d: %v", i, err)
		}
	}
}

func noise(n, size int) (chunks [][]byte) {
	r := rand.NewChaCha8([32]byte{byte(n)})
	for range n {
		b := make([]byte, size)
		_, _ = r.Read(b) // never fails
		chunks = append(chunks, b)
	}
	return chunks
}

// gate is a store whose reads are let through one by one.
type gate struct {
	blob.Store
	pass  chan struct{} // closed: all
	began chan int64    // offsets, in order
}

func newGate(s blob.Store) *gate {
	return &gate{Store: s, pass: make(chan struct{}), began: make(chan int64, 1000)}
}

func (g *gate) Open(ctx context.Context, key string, off, n int64) (io.ReadCloser, error) {
	g.began <- off
	select {
	case <-g.pass:
		return g.Store.Open(ctx, key, off, n)
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

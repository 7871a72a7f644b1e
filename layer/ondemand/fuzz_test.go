package ondemand

import (
	"bytes"
	"context"
	"crypto/sha256"
	"testing"

	"github.com/klauspost/compress/zstd"

	"github.com/opendsec/dsec/layer"
)

// FuzzUnpack: nothing but the content itself is taken for it.
func FuzzUnpack(f *testing.F) {
	z, err := zstd.NewWriter(nil)
	if err != nil {
		f.Fatal(err)
	}
	plain := bytes.Repeat([]byte("content "), 500)
	f.Add(z.EncodeAll(plain, nil))
	f.Add(z.EncodeAll(make([]byte, layer.MaxChunk+1), nil))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, frame []byte) {
		c := layer.Chunk{Sum: sha256.Sum256(plain), Size: uint32(len(plain))}
		got, err := unpack(&c, frame, nil)
		if err == nil && !bytes.Equal(got, plain) {
			t.Error("wrong bytes were taken")
		}
		if len(got) > layer.MaxChunk {
			t.Errorf("%d bytes", len(got))
		}
	})
}

// FuzzPlaces: wherever an index says that chunks lie, each is asked for once,
// and only what is right is here afterwards.
func FuzzPlaces(f *testing.F) {
	good := newOrigin(f, 10, append(noise(4, 3000), make([]byte, 5000))...)
	f.Add([]byte{}, []byte{})
	f.Add([]byte{0, 200, 1, 3, 7}, []byte{1, 2, 3})
	f.Fuzz(func(t *testing.T, moves, sizes []byte) {
		o := *good
		o.ix.Chunks = append([]layer.Chunk(nil), good.ix.Chunks...)
		for i, b := range moves {
			o.ix.Chunks[i%5].Off += uint64(b) * 7
		}
		for i, b := range sizes {
			o.ix.Chunks[i%5].Length ^= uint32(b)
		}
		seen := map[int]int{}
		for _, r := range plan(o.ix, []int{0, 1, 2, 3, 4}) {
			for _, i := range r.chunks {
				seen[i]++
				if c := o.ix.Chunks[i]; c.Length > 0 && (c.Off < r.from || c.Off+uint64(c.Length) > r.to) {
					t.Errorf("chunk %d is not in its request", i)
				}
			}
		}
		l := o.open(t, Options{})
		_ = l.Fill(context.Background()) // what is wrong is wrong
		for i := range 5 {
			if seen[i] != 1 {
				t.Errorf("chunk %d is asked for %d times", i, seen[i])
			}
			b := make([]byte, len(o.plain[i]))
			if l.parts.Present.Has(i) {
				if _, err := l.parts.Data.ReadAt(b, l.offs[i]); err != nil || !bytes.Equal(b, o.plain[i]) {
					t.Errorf("chunk %d is here and wrong", i)
				}
			}
		}
		if err := l.Close(); err != nil || len(l.flights) > 0 {
			t.Errorf("%d chunks are still on their way: %v", len(l.flights), err)
		}
	})
}

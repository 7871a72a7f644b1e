package gc

import (
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"

	"github.com/klauspost/compress/zstd"
	"golang.org/x/sync/errgroup"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob"
	"github.com/opendsec/dsec/layer"
)

// place is where an index says that a chunk is.
type place struct {
	sum    [sha256.Size]byte
	off    uint64
	length uint32
	size   uint32
	index  int32 // number of the index, in the order of their keys
}

func (p place) compare(q place) int {
	switch {
	case p.off != q.off && p.off < q.off, p.off == q.off && p.length < q.length:
		return -1
	case p.off != q.off || p.length != q.length:
		return 1
	}
	return strings.Compare(string(p.sum[:]), string(q.sum[:]))
}

// packs reads every pack once. The places of chunks are held in memory for a
// part of the packs at a time, so that a store of any size can be checked.
func (v *verifier) packs(ctx context.Context) error {
	indexes, packs := v.of(layer.KindIndex), v.of(layer.KindPack)
	var bytes int64
	for _, key := range indexes {
		bytes += v.w.objects[key].size
	}
	parts := int(max(1, min(int64(math.MaxUint8), bytes/52/maxPlaces+1)))
	for part := range parts {
		mine := func(key string) bool {
			_, d, err := layer.ParseKey(key)
			sum := d.Sum()
			return err == nil && int(sum[0])%parts == part
		}
		places, err := v.places(ctx, indexes, mine)
		if err != nil {
			return err
		}
		g, gctx := errgroup.WithContext(ctx)
		g.SetLimit(packsAtOneTime)
		for _, key := range packs {
			if mine(key) {
				g.Go(func() error { return v.note(key, v.pack(gctx, key, places[key], indexes)) })
			}
		}
		if err := g.Wait(); err != nil {
			return err
		}
	}
	return nil
}

// places reads where indexes say that the chunks of some packs are.
func (v *verifier) places(ctx context.Context, indexes []string, mine func(string) bool) (map[string][]place, error) {
	places := map[string][]place{}
	for i, key := range indexes {
		_, d, err := layer.ParseKey(key)
		if err != nil || v.w.broken[key] != nil {
			continue
		}
		raw, err := blob.ReadAll(ctx, v.blobs, key, layer.MaxIndex)
		if dsec.ClassOf(err) == dsec.NotFound {
			continue
		}
		if err != nil {
			return nil, err
		}
		ix, err := layer.DecodeIndexOf(raw, d)
		if err != nil {
			v.damaged(key, err)
			continue
		}
		for j := range ix.Chunks {
			c := &ix.Chunks[j]
			if c.Length == 0 {
				if v.zeros(c.Size) != c.Sum {
					v.damaged(key, dsec.Errorf(dsec.Corrupt, "verify chunk", key, "chunk %d is said to be zero and is not", j))
				}
				continue
			}
			if pack := layer.PackKey(ix.Packs[c.Pack]); mine(pack) {
				places[pack] = append(places[pack], place{c.Sum, c.Off, c.Length, c.Size, int32(i)})
			}
		}
	}
	return places, nil
}

// zeros is the sum of so many zeros.
func (v *verifier) zeros(size uint32) [sha256.Size]byte {
	sum, ok := v.zero[size]
	if !ok {
		sum = sha256.Sum256(make([]byte, size))
		v.zero[size] = sum
	}
	return sum
}

// pack compares a pack with its name and each chunk in it with its sum. A chunk
// that is not where an index says, in a pack that is whole, is damage of the index.
func (v *verifier) pack(ctx context.Context, key string, places []place, indexes []string) error {
	f, err := v.spool(ctx, key)
	if err != nil {
		return err
	}
	defer f.Close()
	z, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(64<<20))
	if err != nil {
		return err
	}
	defer z.Close()
	slices.SortFunc(places, place.compare)
	var last place
	var lastErr error
	var packed, plain []byte
	n := int64(0)
	for i, at := range places {
		if err := ctx.Err(); err != nil {
			return err
		}
		if i == 0 || at.compare(last) != 0 || at.size != last.size {
			n++
			packed = slices.Grow(packed[:0], int(at.length))[:at.length]
			plain, lastErr = unpack(z, f, at, packed, plain[:0])
			last = at
		}
		if lastErr != nil {
			v.damaged(indexes[at.index], dsec.E(dsec.Corrupt, "verify chunk", indexes[at.index], fmt.Errorf("%d bytes at %d of %s: %w", at.length, at.off, key, lastErr)))
		}
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	v.checked.Chunks += n
	return nil
}

func unpack(z *zstd.Decoder, r io.ReaderAt, at place, packed, plain []byte) ([]byte, error) {
	if _, err := r.ReadAt(packed, int64(at.off)); err != nil {
		return plain, err
	}
	plain, err := z.DecodeAll(packed, plain)
	if err != nil {
		return plain, err
	}
	if len(plain) != int(at.size) || sha256.Sum256(plain) != at.sum {
		return plain, fmt.Errorf("content has another sum")
	}
	return plain, nil
}

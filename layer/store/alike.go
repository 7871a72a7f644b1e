package store

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"slices"
	"sync"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob"
	"github.com/opendsec/dsec/layer"
)

// How layers that have chunks in common are found among any number of them:
// one chunk in hintOneIn, chosen by its sum, is a hint, an object that names an
// index with that chunk. A new layer looks up its own and reads the indexes
// that were named most.
const (
	hintOneIn = 64
	mostHints = 256
	mostAlike = 8
	lookups   = 16 // at one time
)

// hints are the sums that stand for the data: the smallest is always one.
func hints(ix layer.Index) [][sha256.Size]byte {
	var out [][sha256.Size]byte
	var least [sha256.Size]byte
	for i := range ix.Chunks {
		sum := ix.Chunks[i].Sum
		if i == 0 || bytes.Compare(sum[:], least[:]) < 0 {
			least = sum
		}
		if binary.BigEndian.Uint64(sum[:])%hintOneIn == 0 {
			out = append(out, sum)
		}
	}
	out = append(out, least)
	slices.SortFunc(out, func(a, b [sha256.Size]byte) int { return bytes.Compare(a[:], b[:]) })
	out = slices.Compact(out)
	return out[:min(len(out), mostHints)]
}

// alike finds where chunks of this data already lie. What cannot be read is not
// there: the data are stored again.
func (s *Store) alike(ctx context.Context, ix layer.Index) (map[[sha256.Size]byte]place, error) {
	votes := map[layer.Digest]int{}
	var mu sync.Mutex
	err := each(hints(ix), func(sum [sha256.Size]byte) error {
		b, err := blob.ReadAll(ctx, s.opts.Blobs, layer.HintKey(layer.FromSum(sum[:])), 128)
		if errors.Is(err, dsec.NotFound.Err()) || errors.Is(err, dsec.Corrupt.Err()) {
			return nil
		}
		if err != nil {
			return err
		}
		if d, err := layer.ParseDigest(string(b)); err == nil {
			mu.Lock()
			votes[d]++
			mu.Unlock()
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	names := make([]layer.Digest, 0, len(votes))
	for d := range votes {
		names = append(names, d)
	}
	slices.SortFunc(names, func(a, b layer.Digest) int {
		if votes[a] != votes[b] {
			return votes[b] - votes[a]
		}
		return bytes.Compare([]byte(a), []byte(b))
	})
	known := map[[sha256.Size]byte]place{}
	for _, d := range names[:min(len(names), mostAlike)] {
		other, err := s.readIndex(ctx, d)
		if err != nil {
			s.opts.Log.Warn("a layer like this one cannot be read; its chunks are stored again", "index", d, "err", err)
			continue
		}
		for i := range other.Chunks {
			c := &other.Chunks[i]
			if _, ok := known[c.Sum]; !ok && c.Length > 0 {
				known[c.Sum] = place{other.Packs[c.Pack], c.Off, c.Length}
			}
		}
	}
	return known, nil
}

// readIndex reads an index of which only the digest of its table is known.
func (s *Store) readIndex(ctx context.Context, table layer.Digest) (layer.Index, error) {
	raw, err := blob.ReadAll(ctx, s.opts.Blobs, layer.IndexKey(table), layer.MaxIndex)
	if err != nil {
		return layer.Index{}, err
	}
	return layer.DecodeIndexOf(raw, table)
}

// hint says that the index has its chunks.
func (s *Store) hint(ctx context.Context, ix layer.Index, table layer.Digest) error {
	return each(hints(ix), func(sum [sha256.Size]byte) error {
		return s.put(ctx, layer.HintKey(layer.FromSum(sum[:])), bytes.NewReader([]byte(table)))
	})
}

// each runs f for all, several at one time, and returns the first error.
func each[T any](all []T, f func(T) error) error {
	var wg sync.WaitGroup
	var mu sync.Mutex
	var first error
	slots := make(chan struct{}, lookups)
	for _, x := range all {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			if err := f(x); err != nil {
				mu.Lock()
				if first == nil {
					first = err
				}
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	return first
}

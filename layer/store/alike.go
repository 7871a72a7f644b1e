package store

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"maps"
	"slices"
	"sync"

	"golang.org/x/sync/errgroup"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob"
	"github.com/opendsec/dsec/layer"
)

// Layers that have chunks in common are found by their hints, see
// layer.Index.Hints. A new layer looks up its own and reads the indexes that
// were named most.
const (
	mostAlike = 8
	lookups   = 16 // at one time
)

// alike finds where chunks of this data already lie. What cannot be read is not
// there: the data are stored again.
func (s *Store) alike(ctx context.Context, ix layer.Index) (map[[sha256.Size]byte]place, error) {
	votes := map[layer.Digest]int{}
	var mu sync.Mutex
	err := each(ix.Hints(), func(sum [sha256.Size]byte) error {
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

// dropGone forgets places in packs that are not there.
func (s *Store) dropGone(ctx context.Context, known map[[sha256.Size]byte]place) error {
	packs := map[layer.Digest]bool{}
	for _, at := range known {
		packs[at.pack] = true
	}
	var mu sync.Mutex
	gone := map[layer.Digest]bool{}
	err := each(slices.Collect(maps.Keys(packs)), func(d layer.Digest) error {
		_, err := s.opts.Blobs.Stat(ctx, layer.PackKey(d))
		if errors.Is(err, dsec.NotFound.Err()) {
			mu.Lock()
			gone[d] = true
			mu.Unlock()
			return nil
		}
		return err
	})
	maps.DeleteFunc(known, func(_ [sha256.Size]byte, at place) bool { return gone[at.pack] })
	return err
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
	return each(ix.Hints(), func(sum [sha256.Size]byte) error {
		return s.put(ctx, layer.HintKey(layer.FromSum(sum[:])), bytes.NewReader([]byte(table)))
	})
}

// each runs f for all, several at one time, and returns the first error.
func each[T any](all []T, f func(T) error) error {
	var g errgroup.Group
	g.SetLimit(lookups)
	for _, x := range all {
		g.Go(func() error { return f(x) })
	}
	return g.Wait()
}

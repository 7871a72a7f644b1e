package chunking

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"time"

	"github.com/klauspost/compress/zstd"
	"golang.org/x/sync/errgroup"
)

// Chunk is one piece of a data file and where its frame lies.
type Chunk struct {
	Sum  [sha256.Size]byte
	Off  int64 // in the data file
	Len  int64
	Pack int   // which pack
	At   int64 // in the pack
	Size int64 // compressed; 0: all zero, stored nowhere
}

// Packed is a set of layers in a store.
type Packed struct {
	Scheme Scheme
	Dir    string // holds the packs, by number
	Layers map[string][]Chunk
	ends   map[string][]int64

	Chunks int           // of all layers
	Unique int           // stored
	Plain  int64         // bytes of the unique ones before compression
	Stored int64         // bytes of all packs
	Packs  []int64       // bytes of each: what a layer brought that none before had
	Index  int64         // bytes of the indexes of all layers
	Took   time.Duration // to cut, hash and compress
}

// Bytes of a chunk in an index: sum, pack, compressed length, offset, and if
// they differ, the length in blocks.
const (
	indexFixed    = sha256.Size + 16
	indexVariable = indexFixed + 4
	indexHeader   = 24 + sha256.Size // and the layer's own pack
)

// PackPath is where a pack is.
func (p *Packed) PackPath(n int) string { return filepath.Join(p.Dir, fmt.Sprintf("pack-%d", n)) }

// Remove removes the packs.
func (p *Packed) Remove() error { return os.RemoveAll(p.Dir) }

// Pack pushes layers one after the other into a store in dir.
func Pack(ctx context.Context, s Scheme, layers []*Data, dir string, level zstd.EncoderLevel) (*Packed, error) {
	p := &Packed{Scheme: s, Dir: dir, Layers: map[string][]Chunk{}, ends: map[string][]int64{}}
	begin := time.Now()
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	z, err := zstd.NewWriter(nil, zstd.WithWindowSize(1<<20), zstd.WithEncoderLevel(level), zstd.WithEncoderConcurrency(runtime.NumCPU()))
	if err != nil {
		return nil, err
	}
	seen := map[[sha256.Size]byte]Chunk{}
	for i, d := range layers {
		if err := p.push(ctx, i, d, z, seen); err != nil {
			return nil, errors.Join(err, p.Remove())
		}
	}
	p.Took = time.Since(begin)
	return p, nil
}

// packed at one time.
const batch = 64

func (p *Packed) push(ctx context.Context, n int, d *Data, z *zstd.Encoder, seen map[[sha256.Size]byte]Chunk) (err error) {
	f, err := os.Create(p.PackPath(n))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	ends := p.Scheme.Ends(d)
	chunks := make([]Chunk, len(ends))
	start, at := int64(0), int64(0)
	for i, end := range ends {
		chunks[i] = Chunk{Off: start, Len: end - start, Pack: n}
		start = end
	}
	frames := make([][]byte, batch)
	for from := 0; from < len(chunks); from += batch {
		part := chunks[from:min(from+batch, len(chunks))]
		if err := compress(ctx, part, frames, d, z, seen); err != nil {
			return err
		}
		for i := range part {
			c := &part[i]
			if had, ok := seen[c.Sum]; ok {
				c.Pack, c.At, c.Size = had.Pack, had.At, had.Size
				continue
			}
			c.At, c.Size = at, int64(len(frames[i]))
			if _, err := f.Write(frames[i]); err != nil {
				return err
			}
			at += c.Size
			seen[c.Sum] = *c
			if c.Size > 0 {
				p.Unique++
				p.Plain += c.Len
			}
		}
	}
	each := int64(indexFixed)
	if p.Scheme.Variable {
		each = indexVariable
	}
	p.Layers[d.Name], p.ends[d.Name] = chunks, ends
	p.Chunks += len(chunks)
	p.Stored += at
	p.Packs = append(p.Packs, at)
	p.Index += indexHeader + each*int64(len(chunks))
	return nil
}

// compress sets the sums of the chunks, and the frames of those not yet stored.
func compress(ctx context.Context, part []Chunk, frames [][]byte, d *Data, z *zstd.Encoder, seen map[[sha256.Size]byte]Chunk) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(runtime.NumCPU())
	for i := range part {
		g.Go(func() error {
			plain := d.Bytes[part[i].Off : part[i].Off+part[i].Len]
			part[i].Sum, frames[i] = sha256.Sum256(plain), frames[i][:0]
			if _, ok := seen[part[i].Sum]; !ok && !zero(plain) {
				frames[i] = z.EncodeAll(plain, frames[i])
			}
			return ctx.Err()
		})
	}
	return g.Wait()
}

var zeros [1 << 16]byte

func zero(b []byte) bool {
	for len(b) > 0 {
		n := min(len(b), len(zeros))
		if !bytes.Equal(b[:n], zeros[:n]) {
			return false
		}
		b = b[n:]
	}
	return true
}

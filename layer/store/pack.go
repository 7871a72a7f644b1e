package store

import (
	"crypto/sha256"
	"hash"
	"io"
	"os"
	"runtime"

	"github.com/klauspost/compress/zstd"
	"golang.org/x/sync/errgroup"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/layer"
)

const (
	packBatch = 16       // chunks compressed at one time
	packSize  = 64 << 20 // bytes from which on a pack is full
)

// place is where a chunk lies in the blob store.
type place struct {
	pack layer.Digest
	off  uint64
	size uint32
}

// packer writes chunks into packs, each as a zstd frame of its own and equal
// ones once. The bytes do not depend on how many processors there are.
type packer struct {
	dir    string
	upload func(name layer.Digest, pack io.Reader) error
	z      *zstd.Encoder
	anew   int // chunks, from the first, that go into packs of their own though they be known

	packs map[layer.Digest]uint32 // number in the index
	names []layer.Digest
	known map[[sha256.Size]byte]place
	mine  map[[sha256.Size]byte]layer.Chunk // in packs of this push; Pack is final once it is full

	file  *os.File // the pack being filled; nil: none
	sum   hash.Hash
	off   uint64
	open  []*layer.Chunk // chunks that lie in it
	batch [packBatch]frame
}

type frame struct {
	plain []byte
	anew  bool
	c     *layer.Chunk
	out   []byte
	err   error
}

func newPacker(dir string, known map[[sha256.Size]byte]place, upload func(layer.Digest, io.Reader) error) (*packer, error) {
	z, err := zstd.NewWriter(nil, zstd.WithWindowSize(1<<20))
	if err != nil {
		return nil, err
	}
	return &packer{dir: dir, upload: upload, z: z, packs: map[layer.Digest]uint32{}, known: known, mine: map[[sha256.Size]byte]layer.Chunk{}}, nil
}

func (p *packer) close() {
	if p.file != nil {
		p.file.Close()
	}
}

// pack returns the index with places.
func (p *packer) pack(ix layer.Index, data io.Reader) (layer.Index, error) {
	n := 0
	for i := range ix.Chunks {
		f := &p.batch[n]
		f.c = &ix.Chunks[i]
		if cap(f.plain) < int(f.c.Size) {
			f.plain = make([]byte, f.c.Size)
		}
		f.plain = f.plain[:f.c.Size]
		if _, err := io.ReadFull(data, f.plain); err != nil {
			return ix, err
		}
		f.anew = i < p.anew
		if n++; n == packBatch || i == len(ix.Chunks)-1 || i == p.anew-1 {
			if err := p.write(p.batch[:n]); err != nil {
				return ix, err
			}
			n = 0
		}
		if i == p.anew-1 {
			if err := p.full(); err != nil {
				return ix, err
			}
		}
	}
	if err := p.full(); err != nil {
		return ix, err
	}
	// Equal chunks know each other's place only now.
	for i := range ix.Chunks {
		if c, ok := p.mine[ix.Chunks[i].Sum]; ok {
			ix.Chunks[i] = c
		}
	}
	ix.Packs = p.names
	return ix, nil
}

// write compresses a batch and writes it in order. Nobody on this machine waits
// for a push, but sandboxes that already run on the layer do for the CPUs: half
// of those are left to them.
func (p *packer) write(batch []frame) error {
	var g errgroup.Group
	g.SetLimit(max(1, runtime.GOMAXPROCS(0)/2))
	for i := range batch {
		f := &batch[i]
		f.out = f.out[:0]
		if _, ok := p.known[f.c.Sum]; ok && !f.anew {
			continue
		}
		if _, ok := p.mine[f.c.Sum]; ok {
			continue
		}
		g.Go(func() error {
			f.err = nil
			if sha256.Sum256(f.plain) != f.c.Sum {
				f.err = dsec.Errorf(dsec.Corrupt, "push layer", p.dir, "data does not have the sums of the manifest")
			} else if !allZero(f.plain) {
				f.out = p.z.EncodeAll(f.plain, f.out)
			}
			return f.err
		})
	}
	_ = g.Wait() // each frame has its error
	for i := range batch {
		if err := p.put(&batch[i]); err != nil {
			return err
		}
	}
	return nil
}

func (p *packer) put(f *frame) error {
	if f.err != nil {
		return f.err
	}
	if k, ok := p.known[f.c.Sum]; ok && !f.anew {
		f.c.Pack, f.c.Off, f.c.Length = p.number(k.pack), k.off, k.size
		return nil
	}
	if _, ok := p.mine[f.c.Sum]; ok || len(f.out) == 0 { // there already, or nothing but zeros
		return nil
	}
	if p.file == nil {
		var err error
		if p.file, err = os.CreateTemp(p.dir, "pack-*"); err != nil {
			return err
		}
		p.sum, p.off = sha256.New(), 0
	}
	if _, err := io.MultiWriter(p.file, p.sum).Write(f.out); err != nil {
		return err
	}
	f.c.Off, f.c.Length = p.off, uint32(len(f.out))
	p.off += uint64(len(f.out))
	p.open = append(p.open, f.c)
	p.mine[f.c.Sum] = *f.c
	if p.off >= packSize {
		return p.full()
	}
	return nil
}

// number gives a pack its number in the index.
func (p *packer) number(name layer.Digest) uint32 {
	n, ok := p.packs[name]
	if !ok {
		n = uint32(len(p.names))
		p.packs[name], p.names = n, append(p.names, name)
	}
	return n
}

// full uploads the pack being filled.
func (p *packer) full() error {
	if p.file == nil {
		return nil
	}
	name := layer.FromSum(p.sum.Sum(nil))
	if _, err := p.file.Seek(0, io.SeekStart); err != nil {
		return err
	}
	if err := p.upload(name, p.file); err != nil {
		return err
	}
	n := p.number(name)
	for _, c := range p.open {
		c.Pack = n
		p.mine[c.Sum] = *c
	}
	p.open = p.open[:0]
	err := os.Remove(p.file.Name())
	p.file.Close()
	p.file = nil
	return err
}

func allZero(b []byte) bool {
	for _, c := range b {
		if c != 0 {
			return false
		}
	}
	return true
}

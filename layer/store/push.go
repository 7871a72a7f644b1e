package store

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"os"
	"sync"

	"github.com/klauspost/compress/zstd"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob"
	"github.com/opendsec/dsec/layer"
)

// Keys of a layer in the blob store. The manifest is written last and read
// first: where it is, all is.
func manifestKey(d layer.Digest) string { return "manifests/" + d.Hex() }
func metaKey(d layer.Digest) string     { return "meta/" + d.Hex() }
func indexKey(d layer.Digest) string    { return "indexes/" + d.Hex() }
func packKey(d layer.Digest) string     { return "packs/" + d.Hex() }

// push puts a layer that is here into the blob store, if there is one. All
// that it writes has its content in its name, so whoever was first is right.
func (s *Store) push(ctx context.Context, d layer.Digest) error {
	if s.opts.Blobs == nil {
		return nil
	}
	if _, err := s.opts.Blobs.Stat(ctx, manifestKey(d)); err == nil || !errors.Is(err, dsec.NotFound.Err()) {
		return err
	}
	m, err := s.manifest(d)
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp(s.path("tmp"), "push-*")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	if err := s.pushMeta(ctx, dir, d, m); err != nil {
		return err
	}
	if m.Data.Size > 0 {
		if err := s.pushData(ctx, dir, d, m); err != nil {
			return err
		}
	}
	if err := s.pushLineage(ctx, d); err != nil {
		return err
	}
	return s.put(ctx, manifestKey(d), bytes.NewReader(m.Encode()))
}

// put writes an object unless it is there.
func (s *Store) put(ctx context.Context, key string, r io.Reader) error {
	err := s.opts.Blobs.Put(ctx, key, r, blob.PutOptions{IfAbsent: true})
	if errors.Is(err, dsec.AlreadyExists.Err()) {
		return nil
	}
	return err
}

func (s *Store) pushMeta(ctx context.Context, dir string, d layer.Digest, m layer.Manifest) error {
	meta, err := os.Open(s.path("layers", d.Hex(), "meta"))
	if err != nil {
		return err
	}
	defer meta.Close()
	out, err := os.CreateTemp(dir, "meta-*")
	if err != nil {
		return err
	}
	defer out.Close()
	z, err := zstd.NewWriter(out, zstd.WithEncoderConcurrency(1))
	if err != nil {
		return err
	}
	_, err = io.Copy(z, ctxReader{ctx, meta})
	if err = errors.Join(err, z.Close()); err != nil {
		return err
	}
	if _, err := out.Seek(0, io.SeekStart); err != nil {
		return err
	}
	return s.put(ctx, metaKey(m.Meta.Digest), out)
}

// pushData compresses the chunks into a pack, names it by its content, and
// writes where everything is. The index is of the data, not of the layer: what
// an earlier push of the same data wrote does as well.
func (s *Store) pushData(ctx context.Context, dir string, d layer.Digest, m layer.Manifest) error {
	if _, err := s.opts.Blobs.Stat(ctx, indexKey(m.Data.Chunks)); err == nil || !errors.Is(err, dsec.NotFound.Err()) {
		return err
	}
	data, err := os.Open(s.path("layers", d.Hex(), "data"))
	if err != nil {
		return err
	}
	defer data.Close()
	pack, err := os.CreateTemp(dir, "pack-*")
	if err != nil {
		return err
	}
	defer pack.Close()
	h := sha256.New()
	chunks, err := packChunks(io.LimitReader(ctxReader{ctx, data}, m.Data.Size), io.MultiWriter(pack, h))
	if err != nil {
		return err
	}
	ix := layer.Index{Packs: []layer.Digest{layer.FromSum(h.Sum(nil))}, Chunks: chunks}
	if layer.DigestOf(ix.Sums()) != m.Data.Chunks {
		return dsec.Errorf(dsec.Corrupt, "push layer", string(d), "data does not have the sums of the manifest")
	}
	if _, err := pack.Seek(0, io.SeekStart); err != nil {
		return err
	}
	if err := s.put(ctx, packKey(ix.Packs[0]), pack); err != nil {
		return err
	}
	b, err := ix.Encode()
	if err != nil {
		return err
	}
	return s.put(ctx, indexKey(m.Data.Chunks), bytes.NewReader(b))
}

// packBatch is how many chunks are compressed at one time.
const packBatch = 16

// packChunks writes each chunk as a zstd frame of its own, and equal ones once.
// The bytes do not depend on how many processors there are.
func packChunks(r io.Reader, w io.Writer) ([]layer.Chunk, error) {
	z, err := zstd.NewWriter(nil, zstd.WithWindowSize(layer.ChunkSize))
	if err != nil {
		return nil, err
	}
	p := packer{z: z, w: w, seen: map[[sha256.Size]byte]layer.Chunk{}}
	for i := range p.batch {
		p.batch[i].plain = make([]byte, layer.ChunkSize)
	}
	for {
		n := 0
		for ; n < packBatch; n++ {
			f := &p.batch[n]
			var err error
			f.n, err = io.ReadFull(r, f.plain)
			if err == io.EOF {
				break
			}
			if err != nil && err != io.ErrUnexpectedEOF {
				return nil, err
			}
		}
		if err := p.write(n); err != nil {
			return nil, err
		}
		if n < packBatch {
			return p.chunks, nil
		}
	}
}

type packer struct {
	z      *zstd.Encoder
	w      io.Writer
	off    uint64
	chunks []layer.Chunk
	seen   map[[sha256.Size]byte]layer.Chunk
	batch  [packBatch]frame
}

type frame struct {
	plain []byte
	n     int // of plain
	sum   [sha256.Size]byte
	out   []byte // empty: the chunk is zero
}

// write compresses the first n chunks of the batch and writes them in order.
func (p *packer) write(n int) error {
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			f := &p.batch[i]
			f.sum, f.out = sha256.Sum256(f.plain[:f.n]), f.out[:0]
			if !allZero(f.plain[:f.n]) {
				f.out = p.z.EncodeAll(f.plain[:f.n], f.out)
			}
		})
	}
	wg.Wait()
	for _, f := range p.batch[:n] {
		c, ok := p.seen[f.sum]
		if !ok {
			c = layer.Chunk{Sum: f.sum, Off: p.off, Length: uint32(len(f.out))}
			if _, err := p.w.Write(f.out); err != nil {
				return err
			}
			p.off += uint64(len(f.out))
			p.seen[f.sum] = c
		}
		p.chunks = append(p.chunks, c)
	}
	return nil
}

func allZero(b []byte) bool {
	for _, c := range b {
		if c != 0 {
			return false
		}
	}
	return true
}

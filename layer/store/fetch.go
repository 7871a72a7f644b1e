package store

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/klauspost/compress/zstd"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/blob"
	"github.com/opendsec/dsec/image"
	"github.com/opendsec/dsec/layer"
)

// fetchOnce makes a layer whole on this machine.
func (s *Store) fetchOnce(ctx context.Context, d layer.Digest) error {
	const op = "fetch layer"
	if s.opts.Blobs == nil {
		return dsec.Errorf(dsec.NotFound, op, string(d), "not on this machine, and there is no store to fetch from")
	}
	_, err := s.once(ctx, "fetch "+string(d), func() (layer.Info, error) {
		info, err := s.fetch(ctx, d)
		if err != nil {
			err = diskError(op, string(d), err)
		}
		return info, err
	})
	return err
}

func (s *Store) fetch(ctx context.Context, d layer.Digest) (layer.Info, error) {
	raw, err := blob.ReadAll(ctx, s.opts.Blobs, manifestKey(d), layer.MaxManifest)
	if err != nil {
		return layer.Info{}, err
	}
	m, err := layer.DecodeManifest(raw, d)
	if err != nil {
		return layer.Info{}, err
	}
	dir, err := os.MkdirTemp(s.path("tmp"), "fetch-*")
	if err != nil {
		return layer.Info{}, err
	}
	defer os.RemoveAll(dir)
	var files image.Files
	if err := create(dir, &files); err != nil {
		return layer.Info{}, err
	}
	defer closeAll(files)
	if err := s.fetchMeta(ctx, m, files.Meta); err != nil {
		return layer.Info{}, err
	}
	var sums []byte
	if m.Data.Size > 0 {
		if sums, err = s.fetchData(ctx, m, files.Data); err != nil {
			return layer.Info{}, err
		}
	}
	lineage, err := s.fetchLineage(ctx, d)
	if err != nil {
		return layer.Info{}, err
	}
	return s.finish(dir, m, sums, about{Lineage: lineage})
}

func (s *Store) fetchMeta(ctx context.Context, m layer.Manifest, to io.Writer) error {
	r, err := s.opts.Blobs.Open(ctx, metaKey(m.Meta.Digest), 0, -1)
	if err != nil {
		return err
	}
	defer r.Close()
	z, err := zstd.NewReader(r, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(64<<20))
	if err != nil {
		return err
	}
	defer z.Close()
	h := sha256.New()
	n, err := io.Copy(io.MultiWriter(to, h), io.LimitReader(z, m.Meta.Size+1))
	if err != nil {
		if dsec.ClassOf(err) == dsec.Internal {
			err = dsec.E(dsec.Corrupt, "read metadata", string(m.Meta.Digest), err)
		}
		return err
	}
	if n != m.Meta.Size || layer.FromSum(h.Sum(nil)) != m.Meta.Digest {
		return dsec.Errorf(dsec.Corrupt, "read metadata", string(m.Meta.Digest), "content has another digest")
	}
	return nil
}

// fetchData reads each pack that the data needs once, from the first byte that
// is needed to the last, and returns the sums of the chunks.
func (s *Store) fetchData(ctx context.Context, m layer.Manifest, to *os.File) ([]byte, error) {
	raw, err := blob.ReadAll(ctx, s.opts.Blobs, indexKey(m.Data.Chunks), maxIndex(m.Data))
	if err != nil {
		return nil, err
	}
	ix, err := layer.DecodeIndex(raw, m.Data)
	if err != nil {
		return nil, err
	}
	z, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(layer.ChunkSize))
	if err != nil {
		return nil, err
	}
	defer z.Close()
	u := unpacker{z: z, to: to, size: m.Data.Size, zero: make([]byte, layer.ChunkSize)}
	for i, c := range ix.Chunks {
		if c.Length == 0 {
			if err := u.hole(i, c); err != nil {
				return nil, err
			}
		}
	}
	for p, name := range ix.Packs {
		if err := s.fetchPack(ctx, name, uint32(p), ix.Chunks, &u); err != nil {
			return nil, err
		}
	}
	return ix.Sums(), to.Truncate(m.Data.Size)
}

// maxIndex is the size of the largest index of that many chunks.
func maxIndex(c layer.Chunked) int64 { return 64 + layer.MaxPacks*32 + c.Count()*64 }

func (s *Store) fetchPack(ctx context.Context, name layer.Digest, pack uint32, chunks []layer.Chunk, u *unpacker) error {
	order, from, to := inPack(chunks, pack)
	if len(order) == 0 {
		return nil
	}
	r, err := s.opts.Blobs.Open(ctx, packKey(name), int64(from), int64(to-from))
	if err != nil {
		return err
	}
	defer r.Close()
	pos := from
	var last layer.Chunk
	var frame []byte
	for _, i := range order {
		c := chunks[i]
		switch {
		case frame != nil && c.Off == last.Off && c.Length == last.Length: // equal content is there once
		case c.Off < pos:
			return dsec.Errorf(dsec.Corrupt, "read pack", string(name), "chunk %d overlaps another", i)
		default:
			if _, err := io.CopyN(io.Discard, r, int64(c.Off-pos)); err != nil {
				return short(name, err)
			}
			frame = u.frame(int(c.Length))
			if _, err := io.ReadFull(r, frame); err != nil {
				return short(name, err)
			}
			pos = c.Off + uint64(c.Length)
		}
		last = c
		if err := u.chunk(i, c, frame); err != nil {
			return err
		}
	}
	return nil
}

func short(name layer.Digest, err error) error {
	if err == io.EOF || errors.Is(err, io.ErrUnexpectedEOF) {
		return dsec.Errorf(dsec.Corrupt, "read pack", string(name), "shorter than its index says")
	}
	return err
}

// unpacker writes verified chunks to their places.
type unpacker struct {
	z     *zstd.Decoder
	to    io.WriterAt
	size  int64 // of the whole data
	buf   []byte
	plain []byte
	zero  []byte
}

func (u *unpacker) frame(n int) []byte {
	if cap(u.buf) < n {
		u.buf = make([]byte, n)
	}
	return u.buf[:n]
}

func (u *unpacker) length(i int) int64 {
	return min(layer.ChunkSize, u.size-int64(i)*layer.ChunkSize)
}

func (u *unpacker) hole(i int, c layer.Chunk) error {
	if sha256.Sum256(u.zero[:u.length(i)]) != c.Sum {
		return dsec.E(dsec.Corrupt, "read chunk", fmt.Sprint(i), errors.New("said to be zero and is not"))
	}
	return nil
}

func (u *unpacker) chunk(i int, c layer.Chunk, frame []byte) error {
	plain, err := u.z.DecodeAll(frame, u.plain[:0])
	if err == nil && (int64(len(plain)) != u.length(i) || sha256.Sum256(plain) != c.Sum) {
		err = errors.New("content has another digest")
	}
	if err != nil {
		return dsec.E(dsec.Corrupt, "read chunk", fmt.Sprint(i), err)
	}
	u.plain = plain
	_, err = u.to.WriteAt(plain, int64(i)*layer.ChunkSize)
	return err
}

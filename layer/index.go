package layer

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"
	"sort"

	"github.com/opendsec/dsec"
)

// Chunk says what one piece of plain data is and where its compressed form
// lies. Where it lies in the data follows from the lengths of those before.
type Chunk struct {
	Sum    [sha256.Size]byte // of the plain bytes
	Size   uint32            // plain bytes
	Pack   uint32            // which pack
	Length uint32            // compressed bytes; 0: all zero, and stored nowhere
	Off    uint64            // in the pack
}

// Index finds the chunks of a data file in packs. It is not part of a layer's
// identity: the same data can be packed otherwise. What it says of content is
// verified against the manifest; where it lies is verified by reading it.
type Index struct {
	Packs  []Digest // by the digest of their content
	Chunks []Chunk
}

// The encoding: a header, the packs, the chunks; little endian.
const (
	indexMagic  = "DSECIDX\x02" // the last byte is the version
	indexHeader = 24
	indexChunk  = entrySize + 16
	entrySize   = sha256.Size + 4 // of a chunk in the table that the manifest names
	MaxPacks    = 4096
	MaxChunks   = 4 << 20
	MaxChunk    = 4 << 20 // plain bytes

	// MaxIndex is the size of the largest encoding, in bytes.
	MaxIndex = indexHeader + MaxPacks*sha256.Size + MaxChunks*indexChunk
)

// Encode returns the encoding of the index.
func (ix Index) Encode() ([]byte, error) {
	if len(ix.Packs) > MaxPacks || len(ix.Chunks) > MaxChunks {
		return nil, fmt.Errorf("%d packs and %d chunks", len(ix.Packs), len(ix.Chunks))
	}
	b := append(make([]byte, 0, indexHeader+len(ix.Packs)*sha256.Size+len(ix.Chunks)*indexChunk), indexMagic...)
	b = binary.LittleEndian.AppendUint64(b, uint64(len(ix.Packs)))
	b = binary.LittleEndian.AppendUint64(b, uint64(len(ix.Chunks)))
	for _, p := range ix.Packs {
		sum, err := p.sum()
		if err != nil {
			return nil, err
		}
		b = append(b, sum...)
	}
	for _, c := range ix.Chunks {
		b = c.appendEntry(b)
		b = binary.LittleEndian.AppendUint32(b, c.Pack)
		b = binary.LittleEndian.AppendUint32(b, c.Length)
		b = binary.LittleEndian.AppendUint64(b, c.Off)
	}
	return b, nil
}

func (c *Chunk) appendEntry(b []byte) []byte {
	return binary.LittleEndian.AppendUint32(append(b, c.Sum[:]...), c.Size)
}

// DecodeIndex reads an index and checks that its chunks are those that the
// manifest of the data names.
func DecodeIndex(b []byte, data Chunked) (Index, error) {
	ix, err := decodeIndex(b)
	if err == nil {
		err = ix.matches(data)
	}
	if err != nil {
		return Index{}, dsec.E(dsec.Corrupt, "read chunk index", string(data.Chunks), err)
	}
	return ix, nil
}

// DecodeIndexOf reads an index of which only the digest of its table is known.
func DecodeIndexOf(b []byte, table Digest) (Index, error) {
	ix, err := decodeIndex(b)
	if err == nil && DigestOf(ix.Table()) != table {
		err = errors.New("chunks are not those it is named by")
	}
	if err != nil {
		return Index{}, dsec.E(dsec.Corrupt, "read chunk index", string(table), err)
	}
	return ix, nil
}

func (ix Index) matches(data Chunked) error {
	if int64(len(ix.Chunks)) != data.Count {
		return fmt.Errorf("%d chunks, the manifest has %d", len(ix.Chunks), data.Count)
	}
	if DigestOf(ix.Table()) != data.Chunks {
		return errors.New("chunks are not those of the manifest")
	}
	if n := ix.Size(); n != data.Size {
		return fmt.Errorf("chunks of %d bytes, the manifest has %d", n, data.Size)
	}
	return nil
}

// Table is the list whose digest is Chunked.Chunks.
func (ix Index) Table() []byte {
	b := make([]byte, 0, len(ix.Chunks)*entrySize)
	for i := range ix.Chunks {
		b = ix.Chunks[i].appendEntry(b)
	}
	return b
}

// Size is the number of plain bytes.
func (ix Index) Size() (n int64) {
	for i := range ix.Chunks {
		n += int64(ix.Chunks[i].Size)
	}
	return n
}

// Offsets are where the chunks begin in the data, and, last, where the data end.
func (ix Index) Offsets() []int64 {
	offs := make([]int64, len(ix.Chunks)+1)
	for i := range ix.Chunks {
		offs[i+1] = offs[i] + int64(ix.Chunks[i].Size)
	}
	return offs
}

// Span is which chunks, from one to before another, have bytes of the range.
// offs are Offsets.
func Span(offs []int64, off, n int64) (from, to int) {
	last := len(offs) - 1
	if n <= 0 || off < 0 || off >= offs[last] {
		return 0, 0
	}
	end := off + min(n, offs[last]-off)
	from = sort.Search(last, func(i int) bool { return offs[i+1] > off })
	to = from + sort.Search(last-from, func(i int) bool { return offs[from+i] >= end })
	return from, to
}

func decodeIndex(b []byte) (Index, error) {
	var ix Index
	if len(b) < indexHeader || string(b[:8]) != indexMagic {
		return ix, errors.New("not an index of version 2")
	}
	packs, chunks := binary.LittleEndian.Uint64(b[8:]), binary.LittleEndian.Uint64(b[16:])
	if packs > MaxPacks || chunks > MaxChunks || uint64(len(b)) != indexHeader+packs*sha256.Size+chunks*indexChunk {
		return ix, fmt.Errorf("%d bytes for %d packs and %d chunks", len(b), packs, chunks)
	}
	b = b[indexHeader:]
	for range packs {
		ix.Packs = append(ix.Packs, FromSum(b[:sha256.Size]))
		b = b[sha256.Size:]
	}
	ix.Chunks = make([]Chunk, chunks)
	for i := range ix.Chunks {
		c := &ix.Chunks[i]
		copy(c.Sum[:], b)
		c.Size = binary.LittleEndian.Uint32(b[sha256.Size:])
		b = b[entrySize:]
		c.Pack, c.Length, c.Off = binary.LittleEndian.Uint32(b), binary.LittleEndian.Uint32(b[4:]), binary.LittleEndian.Uint64(b[8:])
		b = b[16:]
		if c.Size == 0 || c.Size > MaxChunk || c.Length > 0 && uint64(c.Pack) >= packs || c.Length > 2*MaxChunk || c.Off > 1<<62 {
			return Index{}, fmt.Errorf("chunk %d of %d bytes: %d bytes at %d of pack %d", i, c.Size, c.Length, c.Off, c.Pack)
		}
	}
	return ix, nil
}

// DecodeTable reads the table of a data file's chunks; their places are nowhere.
func DecodeTable(b []byte, data Chunked) (Index, error) {
	var ix Index
	for len(b) >= entrySize && len(ix.Chunks) < MaxChunks {
		var c Chunk
		copy(c.Sum[:], b)
		c.Size = binary.LittleEndian.Uint32(b[sha256.Size:])
		ix.Chunks = append(ix.Chunks, c)
		b = b[entrySize:]
	}
	err := ix.matches(data)
	if err == nil && len(b) > 0 {
		err = fmt.Errorf("%d bytes behind the last chunk", len(b))
	}
	if err != nil {
		return Index{}, dsec.E(dsec.Corrupt, "read chunk table", string(data.Chunks), err)
	}
	return ix, nil
}

// Verify reads the chunks of data that has says are there, compares each with its
// sum, and counts them. One that goes meanwhile does not count.
func (ix Index) Verify(ctx context.Context, data io.ReaderAt, has func(chunk int) bool) (chunks int64, err error) {
	buf, off := make([]byte, 0), int64(0)
	for i := range ix.Chunks {
		if err := ctx.Err(); err != nil {
			return chunks, err
		}
		c := &ix.Chunks[i]
		if c.Size > MaxChunk {
			return chunks, fmt.Errorf("chunk %d of %d bytes", i, c.Size)
		}
		buf = slices.Grow(buf[:0], int(c.Size))[:c.Size]
		at := off
		if off += int64(c.Size); !has(i) {
			continue
		}
		n, err := data.ReadAt(buf, at)
		if n == len(buf) && sha256.Sum256(buf) == c.Sum {
			chunks++
			continue
		}
		if !has(i) {
			continue
		}
		if n == len(buf) {
			err = errors.New("content has another digest")
		}
		return chunks, fmt.Errorf("chunk %d: %w", i, err)
	}
	return chunks, nil
}

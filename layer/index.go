package layer

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/opendsec/dsec"
)

// Chunk says what one piece of plain data is and where its compressed form
// lies. Its plain length follows from its place: all chunks but the last are
// ChunkSize bytes.
type Chunk struct {
	Sum    [sha256.Size]byte // of the plain bytes
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
	indexMagic  = "DSECIDX\x01" // the last byte is the version
	indexHeader = 24
	indexChunk  = sha256.Size + 16
	MaxPacks    = 4096
	MaxChunks   = MaxData / ChunkSize
)

// Encode returns the encoding of the index.
func (ix Index) Encode() ([]byte, error) {
	if len(ix.Packs) > MaxPacks || len(ix.Chunks) > MaxChunks {
		return nil, fmt.Errorf("%d packs and %d chunks", len(ix.Packs), len(ix.Chunks))
	}
	b := append(make([]byte, 0, indexHeader+len(ix.Packs)*sha256.Size+len(ix.Chunks)*indexChunk), indexMagic...)
	b = binary.LittleEndian.AppendUint32(b, ChunkSize)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(ix.Packs)))
	b = binary.LittleEndian.AppendUint64(b, uint64(len(ix.Chunks)))
	for _, p := range ix.Packs {
		sum, err := p.sum()
		if err != nil {
			return nil, err
		}
		b = append(b, sum...)
	}
	for _, c := range ix.Chunks {
		b = append(b, c.Sum[:]...)
		b = binary.LittleEndian.AppendUint32(b, c.Pack)
		b = binary.LittleEndian.AppendUint32(b, c.Length)
		b = binary.LittleEndian.AppendUint64(b, c.Off)
	}
	return b, nil
}

// DecodeIndex reads an index and checks that its sums are those that the
// manifest of the data names.
func DecodeIndex(b []byte, data Chunked) (Index, error) {
	ix, err := decodeIndex(b)
	if err == nil && int64(len(ix.Chunks)) != data.Count() {
		err = fmt.Errorf("%d chunks, the manifest has %d", len(ix.Chunks), data.Count())
	}
	if err == nil && DigestOf(ix.Sums()) != data.Chunks {
		err = errors.New("sums are not those of the manifest")
	}
	if err != nil {
		return Index{}, dsec.E(dsec.Corrupt, "read chunk index", string(data.Chunks), err)
	}
	return ix, nil
}

// Sums is the list whose digest is Chunked.Chunks.
func (ix Index) Sums() []byte {
	b := make([]byte, 0, len(ix.Chunks)*sha256.Size)
	for _, c := range ix.Chunks {
		b = append(b, c.Sum[:]...)
	}
	return b
}

func decodeIndex(b []byte) (Index, error) {
	var ix Index
	if len(b) < indexHeader || string(b[:8]) != indexMagic {
		return ix, errors.New("not an index of version 1")
	}
	if n := binary.LittleEndian.Uint32(b[8:]); n != ChunkSize {
		return ix, fmt.Errorf("chunks of %d bytes, this program knows %d", n, ChunkSize)
	}
	packs, chunks := binary.LittleEndian.Uint32(b[12:]), binary.LittleEndian.Uint64(b[16:])
	if packs > MaxPacks || chunks > MaxChunks || uint64(len(b)) != indexHeader+uint64(packs)*sha256.Size+chunks*indexChunk {
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
		b = b[sha256.Size:]
		c.Pack, c.Length, c.Off = binary.LittleEndian.Uint32(b), binary.LittleEndian.Uint32(b[4:]), binary.LittleEndian.Uint64(b[8:])
		b = b[16:]
		if c.Length > 0 && c.Pack >= packs || c.Length > 2*ChunkSize || c.Off > 1<<62 {
			return Index{}, fmt.Errorf("chunk %d: %d bytes at %d of pack %d", i, c.Length, c.Off, c.Pack)
		}
	}
	return ix, nil
}

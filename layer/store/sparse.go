package store

import (
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/within"
	"github.com/opendsec/dsec/layer"
)

// piece is a part of a file that is no hole.
type piece struct{ off, n int64 }

// piecesOf are the parts of a file that are no holes, in order, and how long it is.
func piecesOf(f *os.File) (all []piece, size int64, err error) {
	st, err := f.Stat()
	if err != nil {
		return nil, 0, err
	}
	size = st.Size()
	for off := int64(0); off < size; {
		begin, err := unix.Seek(int(f.Fd()), off, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			break // no more data
		}
		if err != nil {
			return nil, 0, os.NewSyscallError("lseek", err)
		}
		end, err := unix.Seek(int(f.Fd()), begin, unix.SEEK_HOLE)
		if err != nil {
			return nil, 0, os.NewSyscallError("lseek", err)
		}
		end = min(end, size)
		if n := len(all) - 1; n >= 0 && all[n].off+all[n].n == begin {
			all[n].n += end - begin
		} else if end > begin {
			all = append(all, piece{begin, end - begin})
		}
		off = end
	}
	return all, size, nil
}

// sparse is a file of which holes are neither read nor stored.
type sparse struct {
	f      *os.File
	pieces []piece
	size   int64
	data   layer.Index // of what is no hole, without places
	names  layer.Chunked
}

// read is what is no hole, one after the other.
func (s *sparse) read(ctx context.Context) io.Reader {
	parts := make([]io.Reader, len(s.pieces))
	for i, e := range s.pieces {
		parts[i] = io.NewSectionReader(s.f, e.off, e.n)
	}
	return within.Reader(ctx, io.MultiReader(parts...))
}

// describeSparse cuts a file into chunks.
func describeSparse(ctx context.Context, f *os.File) (*sparse, error) {
	pieces, size, err := piecesOf(f)
	if err != nil {
		return nil, err
	}
	s := &sparse{f: f, pieces: pieces, size: size}
	borders, at := make([]int64, 0, len(pieces)), int64(0)
	for _, e := range pieces {
		borders, at = append(borders, at), at+e.n
	}
	if _, s.data, err = layer.Describe(strings.NewReader(""), s.read(ctx), borders); err != nil {
		return nil, err
	}
	ix := s.whole(s.data)
	s.names = layer.Chunked{Size: size, Count: int64(len(ix.Chunks)), Chunks: layer.DigestOf(ix.Table())}
	return s, nil
}

// whole puts the holes between the chunks of what is none.
func (s *sparse) whole(data layer.Index) layer.Index {
	out, next, at := layer.Index{Packs: data.Packs}, 0, int64(0)
	for _, e := range s.pieces {
		out.Chunks = appendHole(out.Chunks, e.off-at)
		for at = e.off; at < e.off+e.n; next++ {
			out.Chunks = append(out.Chunks, data.Chunks[next])
			at += int64(data.Chunks[next].Size)
		}
	}
	out.Chunks = appendHole(out.Chunks, s.size-at)
	return out
}

var wholeHole = sha256.Sum256(make([]byte, layer.MaxChunk))

func appendHole(to []layer.Chunk, n int64) []layer.Chunk {
	for ; n >= layer.MaxChunk; n -= layer.MaxChunk {
		to = append(to, layer.Chunk{Sum: wholeHole, Size: layer.MaxChunk})
	}
	if n > 0 {
		to = append(to, layer.Chunk{Sum: sha256.Sum256(make([]byte, n)), Size: uint32(n)})
	}
	return to
}

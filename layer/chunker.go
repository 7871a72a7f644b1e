package layer

import (
	"errors"
	"io"

	"github.com/cespare/xxhash/v2"
)

// How this program cuts data into chunks; bench/RESULTS.md says what others
// cost. It is the writer's choice: a reader takes any borders. A border is where
// the content of a single block says so, so that equal files give equal chunks
// wherever they lie, and where a large file begins and ends, so that what lies
// beside it is no part of it. All are multiples of a block, so that a chunk can
// be given back to the file system alone.
const (
	cutBlock = 4 << 10  // bytes; contents of files begin at multiples of it
	cutLeast = 32 << 10 // bytes of a chunk that no file's border cuts
	cutMost  = 512 << 10
	cutOneIn = 24 // of the blocks behind the least, one ends a chunk: 128 KiB on average

	// LargeFile is the size, in bytes, from which the borders of a file are
	// borders of chunks.
	LargeFile = 128 << 10
)

// Cutter cuts a stream into chunks.
type Cutter struct {
	r       io.Reader
	borders []int64
	at      int64  // where buf[from] is in the stream
	buf     []byte // what was read and not returned begins at from
	from    int
	to      int
	err     error
}

// NewCutter begins at the reader's place, which should be the start of data.
// borders, ascending multiples of a block, are cut at whatever the content.
func NewCutter(r io.Reader, borders []int64) *Cutter {
	return &Cutter{r: r, borders: borders, buf: make([]byte, 4*cutMost)}
}

// Next returns the next chunk, which is good until the call after; io.EOF
// behind the last.
func (c *Cutter) Next() ([]byte, error) {
	if c.to-c.from < cutMost && c.err == nil {
		copy(c.buf, c.buf[c.from:c.to])
		c.from, c.to = 0, c.to-c.from
		var n int
		n, c.err = io.ReadFull(c.r, c.buf[c.to:])
		c.to += n
		if errors.Is(c.err, io.ErrUnexpectedEOF) {
			c.err = io.EOF
		}
	}
	if c.err != nil && !errors.Is(c.err, io.EOF) {
		return nil, c.err
	}
	if c.from == c.to {
		return nil, io.EOF
	}
	most := min(c.to, c.from+cutMost)
	for len(c.borders) > 0 && c.borders[0] <= c.at {
		c.borders = c.borders[1:]
	}
	if len(c.borders) > 0 {
		most = int(min(int64(most), int64(c.from)+c.borders[0]-c.at))
	}
	n := cut(c.buf[c.from:most])
	b := c.buf[c.from : c.from+n]
	c.from, c.at = c.from+n, c.at+int64(n)
	return b, nil
}

// cut is the length of the first chunk of b.
func cut(b []byte) int {
	for end := cutLeast; end+cutBlock <= len(b); end += cutBlock {
		if xxhash.Sum64(b[end-cutBlock:end])%cutOneIn == 0 {
			return end
		}
	}
	return len(b)
}

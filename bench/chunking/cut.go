package chunking

import (
	"math/bits"
	"math/rand/v2"

	"github.com/cespare/xxhash/v2"
)

// gear has a random number for each byte; the same for all time.
var gear = func() (t [256]uint64) {
	r := rand.New(rand.NewPCG(0x6473_6563, 1))
	for i := range t {
		t[i] = r.Uint64()
	}
	return t
}()

// gearCut returns the length of the first chunk: before the average a border
// is four times rarer, after it four times more frequent.
func gearCut(b []byte, l Limits) int64 {
	n := min(int64(len(b)), l.Max)
	if n <= l.Min {
		return n
	}
	width := bits.Len64(uint64(l.Avg)) - 1
	rare, frequent := mask(width+2), mask(width-2)
	var h uint64
	i := l.Min - 64
	for ; i < l.Min; i++ {
		h = h<<1 + gear[b[i]]
	}
	for normal := min(l.Avg, n); i < normal; i++ {
		if h = h<<1 + gear[b[i]]; h&rare == 0 {
			return i + 1
		}
	}
	for ; i < n; i++ {
		if h = h<<1 + gear[b[i]]; h&frequent == 0 {
			return i + 1
		}
	}
	return n
}

// mask takes the upper bits: they depend on the most bytes.
func mask(width int) uint64 { return ^uint64(0) << (64 - width) }

// blockEnds adds the borders within an extent, without its end: after the
// first block that is at least Min into the chunk and whose hash is one of
// N, or at Max.
func blockEnds(ends []int64, b []byte, e Extent, l Limits) []int64 {
	n := max(uint64((l.Avg-l.Min)/Block), 1)
	start := e.Off
	for off := e.Off; off+Block < e.Off+e.Len; off += Block {
		size := off + Block - start
		if size < l.Min {
			continue
		}
		if size >= l.Max || xxhash.Sum64(b[off:off+Block])%n == 0 {
			start = off + Block
			ends = append(ends, start)
		}
	}
	return ends
}

package layer

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/opendsec/dsec"
)

// Range of a data file, in bytes.
type Range struct {
	Off int64
	Len int64
}

// Bounds of a trace, see docs/formats/trace.md.
const (
	TraceBlock      = 4 << 10 // bytes; what is touched is counted in these
	MaxRecordings   = 256     // merged before all numbers are halved
	MaxTracePieces  = 1 << 16
	maxTraceBlocks  = 1 << 18 // 1 GiB
	maxPosition     = 1 << 36
	alwaysWanted    = 2 // recordings up to which everything is expected again
	wantedOneIn     = 4 // of the recordings must have touched what is expected
	leastRecordings = 2 // that must have

	smallGap = 16 << 10 // bytes; less than a chunk
)

// Trace is what of a layer's data was read first, in order, over several
// recordings. It is immutable; the zero Trace of a layer has no recording.
type Trace struct {
	Layer      Digest
	Window     time.Duration // how long after the first read a recording took; the longest
	Recordings uint32
	Pieces     []Piece // in order
}

// Piece is a row of blocks that were touched alike.
type Piece struct {
	Block  uint32 // the first, of TraceBlock bytes
	Blocks uint32
	Count  uint32 // recordings that touched it
	Placed uint32 // of those, how many say when
	Sum    uint64 // of the positions of the first block in those
}

// Range is where the piece lies.
func (p Piece) Range() Range {
	return Range{Off: int64(p.Block) * TraceBlock, Len: int64(p.Blocks) * TraceBlock}
}

// touches are the numbers of one block.
type touches struct {
	count, placed uint32
	sum           uint64
}

// TraceOf is the trace of one recording. With ordered, the ranges are in the
// order in which they were touched. What is beyond the bounds is left out.
func TraceOf(d Digest, window time.Duration, ranges []Range, ordered bool) Trace {
	blocks := map[uint32]touches{}
	for _, r := range ranges {
		if r.Off < 0 || r.Len <= 0 || r.Off > MaxData-r.Len {
			continue
		}
		for b := r.Off / TraceBlock; b <= (r.Off+r.Len-1)/TraceBlock && len(blocks) < maxTraceBlocks; b++ {
			if _, seen := blocks[uint32(b)]; seen {
				continue
			}
			t := touches{count: 1}
			if ordered {
				t.placed, t.sum = 1, uint64(len(blocks))
			}
			blocks[uint32(b)] = t
		}
	}
	return Trace{Layer: d, Window: max(window, 0), Recordings: 1, Pieces: bound(pieces(blocks))}
}

// MergeTraces adds the recordings of two traces of one layer.
func MergeTraces(a, b Trace) (Trace, error) {
	if a.Layer != b.Layer {
		return Trace{}, dsec.Errorf(dsec.Invalid, "merge traces", string(a.Layer), "the other is of %s", b.Layer)
	}
	blocks := a.blocks()
	for n, t := range b.blocks() {
		have := blocks[n]
		blocks[n] = touches{have.count + t.count, have.placed + t.placed, have.sum + t.sum}
	}
	m := Trace{Layer: a.Layer, Window: max(a.Window, b.Window), Recordings: a.Recordings + b.Recordings}
	for m.Recordings > MaxRecordings {
		m.Recordings /= 2
		halve(blocks)
	}
	m.Pieces = bound(pieces(blocks))
	return m, nil
}

// halve forgets half of the recordings. What a block loses of its sum keeps the
// mean, rounded down, so that blocks of one piece stay in one.
func halve(blocks map[uint32]touches) {
	for n, t := range blocks {
		h := touches{count: t.count / 2, placed: t.placed / 2}
		if h.count == 0 {
			delete(blocks, n)
			continue
		}
		if h.placed > 0 {
			h.sum = t.sum / uint64(t.placed) * uint64(h.placed)
		}
		blocks[n] = h
	}
}

func (t Trace) blocks() map[uint32]touches {
	out := map[uint32]touches{}
	for _, p := range t.Pieces {
		for i := range p.Blocks {
			out[p.Block+i] = touches{p.Count, p.Placed, p.Sum + uint64(i)*uint64(p.Placed)}
		}
	}
	return out
}

// pieces puts blocks together and sorts them.
func pieces(blocks map[uint32]touches) []Piece {
	var out []Piece
	for _, n := range slices.Sorted(maps.Keys(blocks)) {
		t := blocks[n]
		next := Piece{Block: n, Blocks: 1, Count: t.count, Placed: t.placed, Sum: t.sum}
		if k := len(out) - 1; k >= 0 && out[k].goesOn(next) {
			out[k].Blocks++
			continue
		}
		out = append(out, next)
	}
	slices.SortFunc(out, Piece.compare)
	return out
}

// goesOn says whether both are one piece.
func (p Piece) goesOn(next Piece) bool {
	return uint64(p.Block)+uint64(p.Blocks) == uint64(next.Block) && p.Count == next.Count && p.Placed == next.Placed &&
		p.Sum+uint64(p.Blocks)*uint64(p.Placed) == next.Sum
}

// compare is the order of pieces: by the mean position, what has none last.
func (p Piece) compare(q Piece) int {
	if (p.Placed == 0) != (q.Placed == 0) {
		return cmp.Compare(q.Placed, p.Placed)
	}
	// sum/placed as fractions; a sum is below 2^44, a number of recordings below 2^9.
	return cmp.Or(cmp.Compare(p.Sum*uint64(q.Placed), q.Sum*uint64(p.Placed)), cmp.Compare(p.Block, q.Block))
}

// bound keeps the pieces that most recordings touched, in their order.
func bound(all []Piece) []Piece {
	blocks := uint32(0)
	for _, p := range all {
		blocks += p.Blocks // of at most two traces within the bounds
	}
	if len(all) <= MaxTracePieces && blocks <= maxTraceBlocks {
		return all
	}
	slices.SortStableFunc(all, func(p, q Piece) int { return cmp.Compare(q.Count, p.Count) })
	kept, left := all[:0], uint32(maxTraceBlocks)
	for _, p := range all[:min(len(all), MaxTracePieces)] {
		p.Blocks = min(p.Blocks, left)
		if left -= p.Blocks; p.Blocks > 0 {
			kept = append(kept, p)
		}
	}
	slices.SortFunc(kept, Piece.compare)
	return kept
}

// Ranges is what the next sandbox is expected to read, in order: what one odd
// one has read is not in it.
func (t Trace) Ranges() []Range { return t.expected(0) }

// Ahead is Ranges to fetch: those between which there is next to nothing are
// one, so that they come in one request.
func (t Trace) Ahead() []Range { return t.expected(smallGap) }

func (t Trace) expected(gap int64) []Range {
	var out []Range
	for _, p := range t.Pieces {
		if !t.Expected(p) {
			continue
		}
		r := p.Range()
		if k := len(out) - 1; k >= 0 {
			end := out[k].Off + out[k].Len
			if r.Off >= end && r.Off-end <= gap {
				out[k].Len = r.Off + r.Len - out[k].Off
				continue
			}
		}
		out = append(out, r)
	}
	return out
}

// Expected says whether enough recordings touched a piece to believe that the
// next sandbox will.
func (t Trace) Expected(p Piece) bool {
	if t.Recordings <= alwaysWanted {
		return true
	}
	return p.Count >= max(leastRecordings, (t.Recordings+wantedOneIn-1)/wantedOneIn)
}

// Bytes is how much the pieces are.
func (t Trace) Bytes() (n int64) {
	for _, p := range t.Pieces {
		n += p.Range().Len
	}
	return n
}

// ExpectedBytes is how much Ranges are.
func (t Trace) ExpectedBytes() (n int64) {
	for _, p := range t.Pieces {
		if t.Expected(p) {
			n += p.Range().Len
		}
	}
	return n
}

// Moved is the trace of a layer with the same contents at other places: move
// says where a range of the one lies in the other, in parts, in its order.
// Each part is of whole blocks; what has gone is left out.
func (t Trace) Moved(d Digest, move func(Range) []Range) Trace {
	blocks := map[uint32]touches{}
	for _, p := range t.Pieces {
		for i := range p.Blocks {
			old := Range{Off: int64(p.Block+i) * TraceBlock, Len: TraceBlock}
			for _, r := range move(old) {
				// Two files that shared a block have one each now: the first of their touches stays.
				if b := uint32(r.Off / TraceBlock); blocks[b].count == 0 && len(blocks) < maxTraceBlocks {
					blocks[b] = touches{p.Count, p.Placed, p.Sum + uint64(i)*uint64(p.Placed)}
				}
			}
		}
	}
	return Trace{Layer: d, Window: t.Window, Recordings: t.Recordings, Pieces: bound(pieces(blocks))}
}

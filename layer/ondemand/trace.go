package ondemand

import (
	"math/bits"
	"sync"
	"time"

	"github.com/opendsec/dsec/layer"
)

// Range of a data file, in bytes.
type Range = layer.Range

const (
	traceBlock = 4 << 10
	maxTrace   = 1 << 16 // ranges
)

// trace notes what was read first of a layer, in order, and what was read at all.
type trace struct {
	mu     sync.Mutex
	window time.Duration
	until  time.Time        // zero: nobody has read
	seen   map[int64]uint64 // blocks that were ever read, 64 in each
	ranges []Range
}

func (t *trace) begin(window time.Duration) { t.window, t.seen = window, map[int64]uint64{} }

// note adds the blocks of a range that were not read before, and says how many
// bytes those have.
func (t *trace) note(off, n int64) (fresh int64) {
	if n <= 0 {
		return 0
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	now := time.Now()
	if t.until.IsZero() {
		t.until = now.Add(t.window)
	}
	records := !now.After(t.until)
	for b, last := off/traceBlock, (off+n-1)/traceBlock; b <= last; {
		word := b / 64
		end := min(last, word*64+63)
		wanted := (^uint64(0) >> (63 - (end - b))) << (b % 64)
		unseen := wanted &^ t.seen[word]
		if unseen != 0 {
			t.seen[word] |= unseen
			fresh += int64(bits.OnesCount64(unseen)) * traceBlock
		}
		for ; records && unseen != 0; unseen &= unseen - 1 {
			t.record(word*64 + int64(bits.TrailingZeros64(unseen)))
		}
		b = end + 1
	}
	return fresh
}

// record adds a block to the ranges.
func (t *trace) record(b int64) {
	if k := len(t.ranges) - 1; k >= 0 && t.ranges[k].Off+t.ranges[k].Len == b*traceBlock {
		t.ranges[k].Len += traceBlock
	} else if len(t.ranges) < maxTrace {
		t.ranges = append(t.ranges, Range{Off: b * traceBlock, Len: traceBlock})
	}
}

// Trace is what was read in the first seconds, in the order in which it was.
func (l *Layer) Trace() []Range {
	l.trace.mu.Lock()
	defer l.trace.mu.Unlock()
	return append([]Range(nil), l.trace.ranges...)
}

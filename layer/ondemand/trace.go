package ondemand

import (
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

// trace notes what was read first of a layer, in order.
type trace struct {
	mu     sync.Mutex
	window time.Duration
	until  time.Time // zero: nobody has read
	seen   map[int64]uint64
	ranges []Range
}

func (t *trace) begin(window time.Duration) { t.window, t.seen = window, map[int64]uint64{} }

// note adds the blocks of a range that were not read before.
func (t *trace) note(off, n int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := time.Now()
	if t.until.IsZero() {
		t.until = now.Add(t.window)
	}
	if now.After(t.until) || n <= 0 || len(t.ranges) >= maxTrace {
		return
	}
	for b := off / traceBlock; b <= (off+n-1)/traceBlock; b++ {
		bit := uint64(1) << (b % 64)
		if t.seen[b/64]&bit != 0 {
			continue
		}
		t.seen[b/64] |= bit
		if k := len(t.ranges) - 1; k >= 0 && t.ranges[k].Off+t.ranges[k].Len == b*traceBlock {
			t.ranges[k].Len += traceBlock
			continue
		}
		t.ranges = append(t.ranges, Range{Off: b * traceBlock, Len: traceBlock})
	}
}

// Trace is what was read in the first seconds, in the order in which it was.
func (l *Layer) Trace() []Range {
	l.trace.mu.Lock()
	defer l.trace.mu.Unlock()
	return append([]Range(nil), l.trace.ranges...)
}

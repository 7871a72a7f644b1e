package hedge

import (
	"math/bits"
	"slices"
	"sync"
	"time"
)

const (
	recent     = 256 // reads of a size that are remembered
	recompute  = 16  // reads between two looks at them
	percentile = 0.99
	mostSaved  = 10 // hedges that may be saved up in good times
)

// times are how long reads took, by size, and how many may be hedged.
type times struct {
	classes [34]class // of reads within a factor of four, and last of those to the end
	mu      sync.Mutex
	saved   float64 // hedges
}

func (t *times) of(n int64) *class {
	if n < 0 {
		return &t.classes[len(t.classes)-1]
	}
	return &t.classes[bits.Len64(uint64(n))/2]
}

func (t *times) earn(share float64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.saved = min(mostSaved, t.saved+share)
}

func (t *times) spend() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.saved < 1 {
		return false
	}
	t.saved--
	return true
}

func (t *times) refund() { t.earn(1) }

// class are the times of reads of one size. Of one that was hedged it is the
// winner's, from the start of the first: a store that has become slow is soon
// known to be.
type class struct {
	mu    sync.Mutex
	ring  []time.Duration
	next  int
	fresh int // since bound was computed
	bound time.Duration
}

func (c *class) add(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.ring) < recent {
		c.ring = append(c.ring, d)
	} else {
		c.ring[c.next] = d
		c.next = (c.next + 1) % recent
	}
	c.fresh++
}

// late is when a read is; false if fewer than known were seen.
func (c *class) late(known int) (time.Duration, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.ring) < known {
		return 0, false
	}
	if c.bound == 0 || c.fresh >= recompute {
		sorted := slices.Sorted(slices.Values(c.ring))
		c.bound, c.fresh = sorted[int(percentile*float64(len(sorted)-1))], 0
	}
	return c.bound, true
}

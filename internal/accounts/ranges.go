package accounts

import (
	"sync"

	"github.com/opendsec/dsec"
)

// Ranges hands out ranges of IDs uids and gids. A range belongs to one sandbox until Give;
// the caller gives it back only when no file of it is left. Safe for concurrent use.
type Ranges struct {
	base uint32 // first uid of range 0
	n    int    // ranges

	mu   sync.Mutex
	used map[uint32]dsec.SandboxID // by first uid
	next int                       // range to try first: a freed one rests as long as possible
}

// NewRanges are n ranges from the uid base on, or as many as there are uids: also if n is 0.
func NewRanges(base uint32, n int) *Ranges {
	most := int((1<<32 - 1 - uint64(base)) / IDs)
	if n <= 0 || n > most {
		n = most
	}
	return &Ranges{base: base, n: n, used: map[uint32]dsec.SandboxID{}}
}

// Count is the number of ranges, taken or not.
func (r *Ranges) Count() int { return r.n }

// Take returns the first uid of a range that nobody has; ResourceExhausted if there is none.
func (r *Ranges) Take(id dsec.SandboxID) (uint32, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for i := range r.n {
		k := (r.next + i) % r.n
		first := r.base + uint32(k)*IDs
		if _, taken := r.used[first]; !taken {
			r.used[first] = id
			r.next = (k + 1) % r.n
			return first, nil
		}
	}
	return 0, dsec.Errorf(dsec.ResourceExhausted, "take uid range for", string(id), "all %d are in use", r.n)
}

// Adopt marks a range that a sandbox of an earlier process has.
func (r *Ranges) Adopt(first uint32, id dsec.SandboxID) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if other, taken := r.used[first]; taken && other != id {
		return dsec.Errorf(dsec.Internal, "adopt uid range of", string(id), "range %d belongs to %s", first, other)
	}
	r.used[first] = id
	return nil
}

// Pass gives a range to another owner.
func (r *Ranges) Pass(first uint32, from, to dsec.SandboxID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.used[first] == from {
		r.used[first] = to
	}
}

// Give gives a range back, if it is the sandbox's.
func (r *Ranges) Give(first uint32, id dsec.SandboxID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.used[first] == id {
		delete(r.used, first)
	}
}

// InUse is the number of ranges that somebody has.
func (r *Ranges) InUse() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.used)
}

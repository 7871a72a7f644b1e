package gvisor

import (
	"sync"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/accounts"
)

// idCount is the number of uids and gids of a sandbox.
const idCount = accounts.IDs

// ranges hands out uid ranges. A range belongs to one sandbox until give; the
// caller gives it back only when no file of it is left.
type ranges struct {
	base uint32 // first uid of range 0
	n    int    // ranges

	mu   sync.Mutex
	used map[uint32]dsec.SandboxID // by first uid
	next int                       // range to try first: a freed one rests as long as possible
}

func newRanges(base uint32, n int) *ranges {
	most := int((1<<32 - 1 - uint64(base)) / idCount)
	if n <= 0 || n > most {
		n = most
	}
	return &ranges{base: base, n: n, used: map[uint32]dsec.SandboxID{}}
}

func (r *ranges) take(id dsec.SandboxID) (uint32, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for i := range r.n {
		k := (r.next + i) % r.n
		first := r.base + uint32(k)*idCount
		if _, taken := r.used[first]; !taken {
			r.used[first] = id
			r.next = (k + 1) % r.n
			return first, nil
		}
	}
	return 0, dsec.Errorf(dsec.ResourceExhausted, "take uid range for", string(id), "all %d are in use", r.n)
}

// adopt marks a range that a sandbox of an earlier process has.
func (r *ranges) adopt(first uint32, id dsec.SandboxID) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if other, taken := r.used[first]; taken && other != id {
		return dsec.Errorf(dsec.Internal, "adopt uid range of", string(id), "range %d belongs to %s", first, other)
	}
	r.used[first] = id
	return nil
}

func (r *ranges) give(first uint32, id dsec.SandboxID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.used[first] == id {
		delete(r.used, first)
	}
}

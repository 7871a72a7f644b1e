package layer

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"slices"
)

// How layers that have chunks in common are found among any number of them:
// one chunk in hintOneIn, chosen by its sum, is a hint, an object that names an
// index with that chunk.
const (
	hintOneIn = 64
	mostHints = 256
)

// Hints are the sums that stand for the data: the smallest is always one.
func (ix Index) Hints() [][sha256.Size]byte {
	var out [][sha256.Size]byte
	var least [sha256.Size]byte
	for i := range ix.Chunks {
		sum := ix.Chunks[i].Sum
		if i == 0 || bytes.Compare(sum[:], least[:]) < 0 {
			least = sum
		}
		if binary.BigEndian.Uint64(sum[:])%hintOneIn == 0 {
			out = append(out, sum)
		}
	}
	out = append(out, least)
	slices.SortFunc(out, func(a, b [sha256.Size]byte) int { return bytes.Compare(a[:], b[:]) })
	out = slices.Compact(out)
	return out[:min(len(out), mostHints)]
}

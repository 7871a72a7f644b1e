package bpf

import (
	"crypto/sha256"
	"encoding/binary"
	"maps"
	"slices"

	"github.com/opendsec/dsec/netpolicy"
)

// prefixOf is a key of the plans without the plan.
func prefixOf(key []byte) string { return string(key[:4]) + string(key[8:]) }

// contentKey is the same for plans that are equal.
func contentKey(content map[string]string) string {
	h := sha256.New()
	for _, prefix := range slices.Sorted(maps.Keys(content)) {
		h.Write([]byte(prefix))
		h.Write([]byte(content[prefix]))
	}
	return string(h.Sum(nil))
}

// Counts implements netpolicy.Gate.
func (g *Gate) Counts(link int) (netpolicy.Counts, error) {
	var b []byte
	if err := g.maps.Counts.Lookup(uint32(link), &b); err != nil {
		return netpolicy.Counts{}, err
	}
	at := func(i int) int64 { return int64(binary.NativeEndian.Uint64(b[8*i:])) }
	return netpolicy.Counts{Out: at(0), OutBytes: at(1), In: at(2), Refused: at(3)}, nil
}

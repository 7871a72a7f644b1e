package bpf

import (
	"crypto/sha256"
	"encoding/binary"
	"maps"
	"slices"
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

// Counts are packets of a link.
type Counts struct {
	Out, OutBytes int64 // from the sandbox, that were opened
	In            int64 // to it
	Refused       int64 // from it
}

// Counts so far.
func (g *Gate) Counts(link int) (Counts, error) {
	var b []byte
	if err := g.maps.Counts.Lookup(uint32(link), &b); err != nil {
		return Counts{}, err
	}
	at := func(i int) int64 { return int64(binary.NativeEndian.Uint64(b[8*i:])) }
	return Counts{Out: at(0), OutBytes: at(1), In: at(2), Refused: at(3)}, nil
}

// Refused implements netpolicy.Gate.
func (g *Gate) Refused(link int) (int64, error) {
	c, err := g.Counts(link)
	return c.Refused, err
}

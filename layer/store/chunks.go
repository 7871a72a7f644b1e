package store

import (
	"cmp"
	"slices"

	"github.com/opendsec/dsec/layer"
)

// inPack lists the chunks that lie in a pack in the order of their places, and
// the range of the pack that they span.
func inPack(chunks []layer.Chunk, pack uint32) (order []int, from, to uint64) {
	for i, c := range chunks {
		if c.Length > 0 && c.Pack == pack {
			order = append(order, i)
			to = max(to, c.Off+uint64(c.Length))
		}
	}
	slices.SortFunc(order, func(a, b int) int { return cmp.Compare(chunks[a].Off, chunks[b].Off) })
	if len(order) > 0 {
		from = chunks[order[0]].Off
	}
	return order, from, to
}

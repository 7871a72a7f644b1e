package gc

import (
	"cmp"
	"slices"
	"strings"

	"github.com/opendsec/dsec/layer"
)

// span is a part of a pack.
type span struct {
	pack     string // key
	from, to uint64
}

// spansOf are the parts of packs that an index names, those that touch as one.
func spansOf(ix layer.Index) []span {
	all := make([]span, 0, len(ix.Chunks))
	keys := make([]string, len(ix.Packs))
	for i, d := range ix.Packs {
		keys[i] = layer.PackKey(d)
	}
	for i := range ix.Chunks {
		if c := &ix.Chunks[i]; c.Length > 0 {
			all = append(all, span{keys[c.Pack], c.Off, c.Off + uint64(c.Length)})
		}
	}
	return merged(all)
}

// merged sorts spans and joins those that touch.
func merged(all []span) []span {
	slices.SortFunc(all, func(a, b span) int {
		if c := strings.Compare(a.pack, b.pack); c != 0 {
			return c
		}
		return cmp.Compare(a.from, b.from)
	})
	out := all[:0]
	for _, s := range all {
		if n := len(out); n > 0 && out[n-1].pack == s.pack && s.from <= out[n-1].to {
			out[n-1].to = max(out[n-1].to, s.to)
			continue
		}
		out = append(out, s)
	}
	return slices.Clip(out)
}

// dead counts bytes of kept packs that no kept index names.
func (p *pass) dead() (n int64) {
	var all []span
	for key, spans := range p.world.named {
		if p.live[key] {
			all = append(all, spans...)
		}
	}
	named := map[string]int64{}
	for _, s := range merged(all) {
		named[s.pack] += int64(s.to - s.from)
	}
	for key, o := range p.world.objects {
		if kind, _, err := layer.ParseKey(key); err == nil && kind == layer.KindPack && p.live[key] {
			n += max(0, o.size-named[key])
		}
	}
	return n
}

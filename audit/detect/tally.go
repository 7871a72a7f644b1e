package detect

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/opendsec/dsec"
)

const (
	mostKinds  = 64 // of signs of a class that are remembered
	mostOfKind = 4  // records of a kind that are remembered
	mostSure   = 0.99
)

// sign is one thing that speaks for a class.
type sign struct {
	class  dsec.HackClass
	kind   string // signs of one kind count once
	weight float64
	line   string
}

// manyTimes is how often a sign of a kind that ends with manyKind is to be told until it
// weighs manyWeight: one object of a repository is nothing, ten are a search.
const (
	manyTimes  = 6
	manyKind   = "…"
	manyWeight = 0.6
)

// kind is what is remembered of all signs of one.
type kind struct {
	weight   float64
	line     string
	evidence []uint64
	n        int
}

// tally is all that speaks for a class.
type tally struct {
	kinds       map[string]*kind
	first, last time.Time
	count       int64
}

// add counts a sign. When there are too many kinds, the lightest gives way.
func (t *tally) add(s sign, seq uint64, at time.Time, n int64) {
	if t.kinds == nil {
		t.kinds = map[string]*kind{}
	}
	t.count += max(1, n)
	if t.first.IsZero() || at.Before(t.first) {
		t.first = at
	}
	if at.After(t.last) {
		t.last = at
	}
	k := t.kinds[s.kind]
	if k == nil {
		if len(t.kinds) >= mostKinds && !t.dropBelow(s.weight) {
			return
		}
		k = &kind{}
		t.kinds[s.kind] = k
	}
	if s.weight > k.weight {
		k.weight, k.line = s.weight, cut(s.line)
	}
	if k.n++; k.n == manyTimes && strings.HasSuffix(s.kind, manyKind) {
		k.weight = max(k.weight, manyWeight)
	}
	if seq != 0 && len(k.evidence) < mostOfKind {
		k.evidence = append(k.evidence, seq)
	}
}

func (t *tally) dropBelow(weight float64) bool {
	lightest := ""
	for name, k := range t.kinds {
		if old := t.kinds[lightest]; old == nil || k.weight < old.weight || k.weight == old.weight && name > lightest {
			lightest = name
		}
	}
	if t.kinds[lightest].weight >= weight {
		return false
	}
	delete(t.kinds, lightest)
	return true
}

func (t *tally) confidence() float64 {
	doubt := 1.0
	for _, name := range slices.Sorted(maps.Keys(t.kinds)) { // in an order, so that the sum is the same each time
		doubt *= 1 - t.kinds[name].weight
	}
	return min(1-doubt, mostSure)
}

func (t *tally) finding(c dsec.HackClass) dsec.HackFinding {
	f := dsec.HackFinding{Class: c, Confidence: t.confidence(), First: t.first, Last: t.last, Count: t.count}
	kinds := slices.SortedFunc(maps.Values(t.kinds), func(a, b *kind) int {
		return cmp.Or(cmp.Compare(b.weight, a.weight), cmp.Compare(a.line, b.line))
	})
	for _, k := range kinds {
		if len(f.Lines) < dsec.MaxHackLines {
			f.Lines = append(f.Lines, k.line)
		}
		if room := dsec.MaxHackEvidence - len(f.Evidence); room > 0 {
			f.Evidence = append(f.Evidence, k.evidence[:min(room, len(k.evidence))]...)
		}
	}
	slices.Sort(f.Evidence)
	f.Evidence = slices.Compact(f.Evidence)
	f.Title = kinds[0].line
	return f
}

// cut makes a line of any text: no control characters, bounded.
func cut(s string) string {
	s = strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f || r >= 0x80 && r < 0xa0 {
			return ' '
		}
		return r
	}, s)
	if len(s) <= dsec.MaxHackText {
		return s
	}
	end := dsec.MaxHackText - len("…")
	for !utf8.RuneStart(s[end]) {
		end--
	}
	return s[:end] + "…"
}

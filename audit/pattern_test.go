package audit

import (
	"math/rand/v2"
	"path"
	"strings"
	"testing"
	"time"
)

// tryAll is Match as it is explained: "**" is tried with every number of elements, and
// takes one at least at the end.
func tryAll(pattern, e []string) bool {
	if len(pattern) == 0 {
		return len(e) == 0
	}
	if pattern[0] != "**" {
		ok := false
		if len(e) > 0 {
			ok, _ = path.Match(pattern[0], e[0])
		}
		return ok && tryAll(pattern[1:], e[1:])
	}
	if len(pattern) == 1 {
		return len(e) > 0
	}
	for k := range len(e) + 1 {
		if tryAll(pattern[1:], e[k:]) {
			return true
		}
	}
	return false
}

func TestMatchIsThatOfAllTries(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	random := func(most int, of ...string) (list []string) {
		for range 1 + rnd.IntN(most) {
			list = append(list, of[rnd.IntN(len(of))])
		}
		return list
	}
	fit := 0
	for range 100_000 {
		pattern, e := random(5, "a", "b", "*", "a*", "**"), random(7, "a", "b", "ab")
		want := tryAll(pattern, e)
		if got := NewPattern(strings.Join(pattern, "/")).Match(e); got != want {
			t.Fatalf("%q in %q: %v", e, pattern, got)
		}
		if want {
			fit++
		}
	}
	if fit < 10_000 || fit > 90_000 {
		t.Errorf("%d of all fit: nothing is learned", fit)
	}
}

// TestADeepPathCostsLittle: with every number of elements for each "**" it took minutes.
func TestADeepPathCostsLittle(t *testing.T) {
	pattern, e := NewPattern("**/a/**/a/b"), Elements(strings.Repeat("/a", 2048))
	if n := testing.Benchmark(func(b *testing.B) {
		for b.Loop() {
			if pattern.Match(e) {
				b.Fatal("it has no b")
			}
		}
	}); n.NsPerOp() > int64(20*time.Millisecond) { // two million tries are more
		t.Errorf("%v for one path", time.Duration(n.NsPerOp()))
	}
}

// TestElementsMatchAsPathsDo: what is read once says the same as path.Match.
func TestElementsMatchAsPathsDo(t *testing.T) {
	for _, p := range []string{"a", "a*", "*a", "*", "a*b", "?", "[ab]", "[^a]x", "\\*", "\\a", "a\\*", "*a*", "**a", "a**", "*[ab]"} {
		for _, name := range []string{"a", "b", "ab", "aab", "*", "a*", "ba", "x", "ax", "bx", "\\", "\\a", "a\\b"} {
			want, err := path.Match(p, name)
			must(t, err)
			if got := newElement(p).match(name); got != want {
				t.Errorf("%s of %s: %t", p, name, got)
			}
		}
	}
}

package detect

import (
	"context"
	"errors"
	"math/rand/v2"
	"path"
	"strings"
	"testing"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/audit"
)

// tryAll is match as it is explained: "**" is tried with every number of elements, and
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
		if got := match(pattern, e); got != want {
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

// hostile is what is slow to judge: paths that a sandbox made deep, and patterns that nearly fit.
func hostile(records int) (task dsec.HackTask, k audit.Known) {
	for range dsec.MaxHackPatterns {
		task.Tests = append(task.Tests, "**/a/**/"+strings.Repeat("*a", 250)+"b")
	}
	task.Harness, task.Results = task.Tests, task.Tests
	for i := range records {
		k.Records = append(k.Records, dsec.AuditRecord{Seq: uint64(i + 1), Time: began.Add(time.Duration(i)), Kind: dsec.AuditWrite, Exe: "/bin/x",
			Path: strings.Repeat("/a", dsec.MaxAuditText/2), Detail: dsec.WriteChanged})
	}
	return task, k
}

// TestADeepPathCostsLittle: with every number of elements for each "**" it took minutes.
func TestADeepPathCostsLittle(t *testing.T) {
	pattern, e := elements("**/a/**/a/b"), elements(strings.Repeat("/a", 2048))
	if n := testing.Benchmark(func(b *testing.B) {
		for b.Loop() {
			if match(pattern, e) {
				b.Fatal("it has no b")
			}
		}
	}); n.NsPerOp() > int64(20*time.Millisecond) { // two million tries are more
		t.Errorf("%v for one path", time.Duration(n.NsPerOp()))
	}
}

func TestJudgingEndsWhenNobodyWaits(t *testing.T) {
	task, k := hostile(20_000)
	ctx, stop := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer stop()
	start := time.Now()
	_, err := Judge{}.Judge(ctx, task, k)
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v after %v", err, time.Since(start))
	}
}

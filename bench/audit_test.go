package bench

import (
	"slices"
	"strings"
	"testing"
	"time"
)

func TestCostsAreComparedWithinARound(t *testing.T) {
	cost := func(seen bool, round int, ms time.Duration) Cost {
		return Cost{Seen: seen, Round: round, Wall: ms * time.Millisecond, Sandbox: ms * time.Millisecond, Agent: ms * time.Millisecond, Records: 5}
	}
	all := []Cost{cost(false, 0, 100), cost(true, 0, 125), cost(true, 1, 300), cost(false, 1, 200), cost(false, 2, 50)}
	ratios, unseen := ratiosOf(all, Cost.CPU)
	if !slices.Equal(ratios, []float64{1.25, 1.5}) || len(unseen) != 2 || unseen[0] != 200*time.Millisecond {
		t.Errorf("%v %v", ratios, unseen)
	}
	var out strings.Builder
	if CostTable(&out, all); !strings.Contains(out.String(), "1.250-1.500") || !strings.Contains(out.String(), "5 records") {
		t.Error(out.String())
	}
	if CostTable(&out, nil); strings.Contains(out.String(), "NaN") {
		t.Error(out.String())
	}
}

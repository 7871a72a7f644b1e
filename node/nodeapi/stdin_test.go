package nodeapi

import (
	"math"
	"testing"

	"github.com/opendsec/dsec"
)

// TestARefusedOffsetIsNotBelieved: what is written next begins where it would have.
func TestARefusedOffsetIsNotBelieved(t *testing.T) {
	in := &stdin{turn: make(chan struct{}, 1)}
	for _, offset := range []int64{-5, math.MinInt64, math.MaxInt64} {
		if _, err := in.take(t.Context(), "x", &offset); dsec.ClassOf(err) != dsec.Invalid {
			t.Errorf("%d: %v", offset, err)
		}
	}
	start := int64(0)
	if skip, err := in.take(t.Context(), "x", &start); skip != 0 || err != nil {
		t.Errorf("from the start: skips %d, %v", skip, err)
	}
}

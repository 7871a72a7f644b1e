package checks

import (
	"testing"

	"example.org/intset"
)

func TestHas(t *testing.T) {
	var s intset.Set
	for _, n := range []int{0, 1, 62, 63, 64, 200} {
		s.Add(n)
		if !s.Has(n) {
			t.Errorf("%d was added and is not there", n)
		}
	}
	if s.Len() != 6 || s.Has(2) {
		t.Errorf("%d elements", s.Len())
	}
}

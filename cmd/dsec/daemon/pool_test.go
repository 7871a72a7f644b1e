package daemon

import (
	"strings"
	"testing"
)

func TestThePoolOfAMachineThatWasNeverUpIsMeasured(t *testing.T) {
	s := defaults()
	s.Data = t.TempDir() + "/not/yet"
	size, free, err := poolSize(s)
	if err != nil || size <= 0 || free < size {
		t.Errorf("%d of %d, %v", size, free, err)
	}
}

func TestAPoolLargerThanItsDiskIsSaid(t *testing.T) {
	s := defaults()
	s.Data = t.TempDir()
	for _, c := range []struct {
		size, free int64
		ok         bool
	}{{1 << 30, 2 << 30, true}, {8 << 30, 2 << 30, false}, {2 << 30, 2 << 30, true}} {
		got := poolRoom(s, c.size, c.free)
		if got.OK != c.ok || got.Fatal || !strings.Contains(got.Detail, "MiB") || !c.ok && !strings.Contains(got.Detail, s.poolDir()) {
			t.Errorf("%d of %d: %+v", c.size, c.free, got)
		}
	}
}

package guest

import (
	"math"
	"testing"
	"time"
)

func TestNumbersOfAGuestAreBounded(t *testing.T) {
	for _, n := range []int64{math.MinInt64, -1, math.MaxInt64} {
		s := Stats{CPU: 1 << 62, Memory: n, MemoryPeak: n, Pids: n, PidsPeak: n, PidsDenied: n, OOMKills: n, Disk: n, DiskSize: n}.bounded()
		for _, got := range []int64{s.Memory, s.MemoryPeak, s.Pids, s.PidsPeak, s.PidsDenied, s.OOMKills, s.Disk, s.DiskSize} {
			if got < 0 || got > 1<<50 || (n < 0) != (got == 0) {
				t.Errorf("%d became %d", n, got)
			}
		}
		if s.CPU != 365*24*time.Hour {
			t.Error("processor time of", s.CPU)
		}
	}
	if s := (Stats{Memory: 7, Pids: 3}); s.bounded() != s {
		t.Error("what can be so is changed")
	}
}

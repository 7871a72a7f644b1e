package daemon

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opendsec/dsec"
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

func TestAPoolTooSmallIsNotMade(t *testing.T) {
	s := defaults()
	s.Data, s.Node.DiskPool = t.TempDir(), "200MiB"
	err := poolLeast(s, 200<<20)
	if dsec.ClassOf(err) != dsec.Invalid || !strings.Contains(err.Error(), `node.disk_pool: "200MiB" is 200 MiB here, want at least 256 MiB`) {
		t.Error(err)
	}
	if c := poolRoom(s, 200<<20, 1<<30); c.OK || !strings.Contains(c.Detail, "node.disk_pool") {
		t.Errorf("%+v", c)
	}
	if err := poolLeast(s, 256<<20); err != nil {
		t.Error(err)
	}
	if err := errors.Join(os.Mkdir(s.poolDir(), 0o700), os.WriteFile(filepath.Join(s.poolDir(), "pool.btrfs"), nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	if err := poolLeast(s, 200<<20); err != nil {
		t.Errorf("one that is there: %v", err)
	}
}

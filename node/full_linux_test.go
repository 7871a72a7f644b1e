package node

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
)

// TestAFullDiskHarmsNoRunningSandbox has the ledger on a real file system of
// 2 MiB without room.
func TestAFullDiskHarmsNoRunningSandbox(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "size=2m"); err != nil {
		t.Skipf("mount a small tmpfs: %v", err)
	}
	defer func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	}()
	w := newWorld(t, func(c *Config) { c.Dir, c.Budgets.Disk = dir, 1<<40 })
	defer w.shut() // before the unmount
	keep, drop := w.create(nil), w.create(nil)
	filler := filepath.Join(dir, "filler")
	if err := fill(filler); err != nil {
		t.Fatal(err)
	}
	refused := 0
	for range 300 {
		sb, err := w.Create(t.Context(), "proj", spec(nil))
		if err == nil { // the file had free pages
			if _, err = w.Delete(t.Context(), sb.ID, ""); err == nil {
				continue
			}
		}
		wantClass(t, err, dsec.NoSpace)
		if refused++; refused > 3 {
			break
		}
	}
	if refused == 0 {
		t.Fatal("the disk never got full")
	}
	if _, out := w.run(keep.ID, "echo alive"); out != "alive\n" {
		t.Fatal("the running one was harmed")
	}
	_, derr := w.Delete(t.Context(), drop.ID, "")
	if derr != nil {
		wantClass(t, derr, dsec.NoSpace)
	}
	if ids := w.machine.Residue(); len(ids) != 1 || ids[0] != keep.ID {
		t.Fatalf("on the machine: %v", ids)
	}
	if err := os.Remove(filler); err != nil {
		t.Fatal(err)
	}
	w.clock.add(time.Minute)
	w.until("only one is left", func() bool { l, err := w.List(t.Context(), Filter{}); return len(l) == 1 && err == nil })
	w.crash()
	if w.stateOf(keep.ID) != dsec.Running {
		t.Fatal("it was not found again")
	}
}

func fill(path string) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	defer f.Close()
	for _, size := range []int{64 << 10, 4096} {
		for err == nil {
			_, err = f.Write(make([]byte, size))
		}
		if !errors.Is(err, unix.ENOSPC) {
			return err
		}
		err = nil
	}
	return nil
}

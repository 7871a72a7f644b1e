package fullvm

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/diskpool"
	"github.com/opendsec/dsec/process"
	"github.com/opendsec/dsec/runtime"
)

// TestDiskFull: a machine whose disk may not grow stands still, and its sandbox ends for it.
func TestDiskFull(t *testing.T) {
	w := newWorld(t)
	b := w.create(t, request(smallLayer(t), modest, func(r *runtime.Request) { r.Spec.Limits.Disk = 4 << 20 }))
	p, err := w.r.Exec(b.ctx(), b.id, process.Spec{Argv: []string{"/bin/sh", "-c", "dd if=/dev/urandom of=/root/big bs=1M count=8; sync; echo done"}})
	must(t, err)
	x := w.exitOf(t, b.id)
	if x.Cause != dsec.CauseDiskFull || x.By != dsec.InducedBySelf || len(x.Evidence) == 0 {
		t.Errorf("%+v", x)
	}
	t.Log(x.Evidence)
	if _, err := p.Wait(b.ctx()); dsec.ClassOf(err) != dsec.SandboxGone {
		t.Error(err)
	}
	must(t, w.r.Destroy(b.ctx(), b.id))
	w.wantNothing(t)
}

// TestPoolFull: the pool has no room though the sandbox may write more, which is not its own doing.
func TestPoolFull(t *testing.T) {
	w := newWorld(t, func(w *world) { w.pool = 300 << 20 })
	disk := smallLayer(t)
	b := w.create(t, request(disk, modest))
	fill := w.fillPool(t)
	_, err := w.r.Exec(b.ctx(), b.id, process.Spec{Argv: []string{"/bin/sh", "-c", "dd if=/dev/urandom of=/root/big bs=1M count=8; sync"}})
	must(t, err)
	if x := w.exitOf(t, b.id); x.Cause != dsec.CauseInfraCapacity || x.By == dsec.InducedBySelf {
		t.Errorf("%+v", x)
	}
	req := request(disk, modest)
	if _, err := w.r.Create(t.Context(), req); dsec.ClassOf(err) != dsec.NoSpace {
		t.Errorf("a creation without room: %v, want no_space", err)
	}
	must(t, w.disks.Remove(b.ctx(), fill))
	must(t, w.r.Destroy(b.ctx(), b.id))
	w.wantNothing(t)
}

// fillPool takes all the room that a pool has, for a disk of the name that it returns.
func (w *world) fillPool(t *testing.T) string {
	t.Helper()
	const name = "filler"
	dir, err := w.disks.Create(t.Context(), name, 1<<40, diskpool.Owner{})
	must(t, err)
	defer dir.Close()
	f, err := os.Create(inside(dir, "f"))
	must(t, err)
	defer f.Close()
	for size := 1 << 20; size >= 4096; { // what no large piece fits into takes small ones
		_, err := f.Write(make([]byte, size))
		if err == nil {
			err = f.Sync()
		}
		switch {
		case err == nil:
		case errors.Is(err, unix.ENOSPC):
			size /= 2
		default:
			t.Fatal(err)
		}
	}
	return name
}

// TestNoRoomForState: what cannot be written down is not made.
func TestNoRoomForState(t *testing.T) {
	w := newWorld(t)
	disk := tiny(t)
	b := w.create(t, request(disk, small))
	b.says("R")
	dir := filepath.Join(w.dir, "sandboxes")
	must(t, unix.Mount("tmpfs", dir, "tmpfs", 0, "size=64k"))
	defer func() { _ = unix.Unmount(dir, unix.MNT_DETACH) }()
	must(t, os.Mkdir(filepath.Join(dir, string(b.id)), 0o700))
	f, err := os.Create(filepath.Join(dir, "filler"))
	must(t, err)
	_, err = f.Write(make([]byte, 128<<10))
	if !errors.Is(err, unix.ENOSPC) {
		t.Fatal(err)
	}
	must(t, f.Close())
	req := request(disk, small)
	if _, err := w.r.Create(t.Context(), req); dsec.ClassOf(err) != dsec.NoSpace {
		t.Errorf("a creation: %v, want no_space", err)
	}
	if _, err := os.Stat(filepath.Join(dir, string(req.ID))); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("its state is left: %v", err)
	}
	if err := w.r.Pause(b.ctx(), b.id); dsec.ClassOf(err) != dsec.NoSpace {
		t.Errorf("a pause: %v, want no_space", err)
	}
	b.types("x")
	b.says("Rx") // it was not paused
	must(t, os.Remove(filepath.Join(dir, "filler")))
	must(t, unix.Unmount(dir, 0))
	must(t, w.r.Destroy(b.ctx(), b.id))
	w.wantNothing(t)
}

// TestDiskIsWrittenAgain: what a machine writes over, block by block, counts once.
func TestDiskIsWrittenAgain(t *testing.T) {
	w := newWorld(t)
	b := w.create(t, request(smallLayer(t), modest, func(r *runtime.Request) { r.Spec.Limits.Disk = 15 << 20 }))
	const again = `cd /root; dd if=/dev/urandom of=f bs=1M count=8 2>/dev/null; sync
i=0; while [ $i -lt 8 ]; do j=$i; while [ $j -lt 2048 ]; do dd if=/dev/urandom of=f bs=4k count=1 seek=$j conv=notrunc 2>/dev/null; j=$((j+9)); done; sync; i=$((i+1)); done; echo whole`
	if out := b.run(again); out != "whole\n" {
		t.Errorf("%q", out)
	}
	s, err := b.r.Stats(b.ctx(), b.id)
	must(t, err)
	t.Logf("%d KiB of a disk of %d", s.Disk>>10, s.DiskLimit>>10)
}

package ondemandtest

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
)

// full: the data lie on a small disk that something else fills. A mechanism that
// can do without the file reads on, with every byte right and none of them noted
// as here; another one errs. Both keep again what comes when there is room.
func full(t *testing.T, m Mechanism, o *Origin) {
	disk := smallDisk(t)
	if err := m.Supported(disk); err != nil {
		t.Skip(err)
	}
	x := NewMachine(t, m, o, filepath.Join(disk, "layers"))
	ballast := filepath.Join(disk, "ballast")
	if err := fill(ballast); err != nil {
		t.Fatal(err)
	}
	if m.Uncached {
		x.readsUncached()
	} else {
		x.fails(dsec.NoSpace, false)
	}
	if err := os.Remove(ballast); err != nil {
		t.Fatal(err)
	}
	x.heals()
	for end := time.Now().Add(errorsBy); ; { // nothing is brought ahead for a while after a disk was full
		s := x.ask(command{Fill: true})
		if s.Err == "" && s.Complete {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("there is room: %+v", s)
		}
		time.Sleep(50 * time.Millisecond)
	}
	// What is in the file, and not what was read before.
	x.mount.Close()
	x.mount = x.newMount(x.data.Name())
	if err := x.Read(reading{Mapped: true}); err != nil {
		t.Error(err)
	}
}

func (x *Machine) readsUncached() {
	x.t.Helper()
	for _, mapped := range []bool{false, true} {
		if err := x.Read(reading{Mapped: mapped}); err != nil {
			x.t.Errorf("mapped %v: %v", mapped, err)
		}
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(x.data.Fd()), &st); err != nil {
		x.t.Fatal(err)
	}
	s := x.ask(command{})
	if s.Complete || s.Stats.Failures > 0 || s.Uncached.Reads == 0 || s.Uncached.Bytes < s.Size/2 || st.Blocks*512 > s.Size/2 {
		x.t.Errorf("on a full disk, with %d blocks: %+v", st.Blocks, s)
	}
}

// smallDisk is an ext4 of its own, mounted for the test.
func smallDisk(t *testing.T) string {
	t.Helper()
	image, at := filepath.Join(t.TempDir(), "disk"), t.TempDir()
	if err := os.WriteFile(image, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(image, 96<<20); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("mkfs.ext4", "-q", "-m", "0", "-b", "4096", image).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if out, err := exec.Command("mount", "-o", "loop", image, at).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(at, 0); err != nil {
			t.Error(os.NewSyscallError("unmount", err))
		}
	})
	return at
}

// fill writes until the disk is full.
func fill(path string) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	defer f.Close()
	for piece := 1 << 20; piece >= 4<<10; {
		_, err := f.Write(make([]byte, piece))
		if errors.Is(err, unix.ENOSPC) {
			piece /= 2
		} else if err != nil {
			return err
		}
	}
	return f.Sync()
}

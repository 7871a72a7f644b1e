package erofs_test

import (
	"fmt"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// TestE26_MountsThroughLoopDevices is how kernels before 6.12 mount a layer:
// both files behind loop devices.
func TestE26_MountsThroughLoopDevices(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("loop devices need root: uid is", os.Geteuid())
	}
	f, d := dataFile(t)
	b := write(t, everything(t, d), f, d.Blocks())
	want := describeMount(t, mount(t, b))
	looped := built{meta: loop(t, b.meta), data: loop(t, b.data), blocks: b.blocks}
	diffLines(t, "files", want, "loop devices", describeMount(t, mount(t, looped)))
}

// loop puts a file behind a read-only loop device that goes away with its last user.
func loop(t *testing.T, file string) string {
	t.Helper()
	ctl, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		t.Skip("this machine has no loop devices:", err)
	}
	defer ctl.Close()
	backing, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer backing.Close()
	for range 10 { // another process may take the free one first
		n, err := unix.IoctlRetInt(int(ctl.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			t.Skip("this machine has no free loop device:", err)
		}
		name := fmt.Sprintf("/dev/loop%d", n)
		dev, err := os.Open(name)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { dev.Close() })
		conf := unix.LoopConfig{Fd: uint32(backing.Fd()), Info: unix.LoopInfo64{Flags: unix.LO_FLAGS_READ_ONLY | unix.LO_FLAGS_AUTOCLEAR}}
		if err := unix.IoctlLoopConfigure(int(dev.Fd()), &conf); err == nil {
			return name
		}
	}
	t.Fatal("no loop device to be had")
	return ""
}

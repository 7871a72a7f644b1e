package qemu

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/linux"
)

// openTap makes a tap in a network namespace that lives as long as the tap.
func openTap(t *testing.T) (tap *os.File) {
	t.Helper()
	err := linux.OnThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return err
		}
		f, err := os.OpenFile("/dev/net/tun", os.O_RDWR, 0)
		if err != nil {
			return err
		}
		req, err := unix.NewIfreq("tap0")
		if err != nil {
			return err
		}
		req.SetUint16(unix.IFF_TAP | unix.IFF_NO_PI)
		if err := unix.IoctlIfreq(int(f.Fd()), unix.TUNSETIFF, req); err != nil {
			return err
		}
		tap = f
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return tap
}

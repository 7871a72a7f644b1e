package gvisor

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/linux"
)

// newNetNS makes a network namespace that stands for the machine's.
func newNetNS(t testing.TB) *os.File {
	t.Helper()
	var ns *os.File
	must(t, linux.OnThread(func() (err error) {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return err
		}
		ns, err = os.Open("/proc/thread-self/ns/net")
		return err
	}))
	t.Cleanup(func() { ns.Close() })
	return ns
}

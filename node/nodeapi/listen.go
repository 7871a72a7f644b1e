package nodeapi

import (
	"errors"
	"io/fs"
	"net"
	"os"
	"syscall"

	"github.com/opendsec/dsec"
)

// ListenUnix makes the socket of the data listener, 0600, and gives it to the
// gateway's uid (-1: keeps it). An old socket is replaced: there is one agent.
func ListenUnix(path string, gatewayUID int) (net.Listener, error) {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, dsec.E(dsec.Unavailable, "listen", path, err)
	}
	old := syscall.Umask(0o177)
	l, err := net.Listen("unix", path)
	syscall.Umask(old)
	if err == nil && gatewayUID >= 0 {
		if err = os.Chown(path, gatewayUID, -1); err != nil {
			_ = l.Close()
		}
	}
	if err != nil {
		return nil, dsec.E(dsec.Unavailable, "listen", path, err)
	}
	return l, nil
}

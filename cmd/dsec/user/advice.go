package user

import (
	"errors"
	"io/fs"
	"net"
	"syscall"
)

// Advice is what to do about an error that comes from where the server should
// be; "" if there is nothing to add.
func Advice(err error) string {
	dial, ok := errors.AsType[*net.OpError](err)
	if !ok || dial.Op != "dial" {
		return ""
	}
	switch {
	case errors.Is(err, fs.ErrPermission):
		return "the socket is for root and the members of its group: use sudo, join the group, or set DSEC_URL and DSEC_API_KEY"
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ECONNREFUSED):
		return `is it up? "sudo dsec up" starts it here; "dsec context" and DSEC_URL name another server`
	}
	return ""
}

// Package fault classes what an operating system says about a local file
// system.
package fault

import (
	"context"
	"errors"
	"io/fs"
	"syscall"

	"github.com/opendsec/dsec"
)

// Class of an error; other if nothing is known of it. An error that has a class
// keeps it, the outermost decides.
func Class(err error, other dsec.Class) dsec.Class {
	if e, ok := errors.AsType[*dsec.Error](err); ok {
		return e.Class
	}
	switch {
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return dsec.NoSpace
	case errors.Is(err, fs.ErrNotExist):
		return dsec.NotFound
	case errors.Is(err, fs.ErrPermission):
		return dsec.PermissionDenied
	case errors.Is(err, context.Canceled):
		return dsec.Canceled
	case errors.Is(err, context.DeadlineExceeded):
		return dsec.Timeout
	case errors.Is(err, syscall.EIO):
		return dsec.Internal
	}
	return other
}

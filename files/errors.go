package files

import (
	"context"
	"errors"
	"io"
	"os"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
)

// The operations as they appear in errors.
const (
	opStat     = "stat"
	opList     = "list directory"
	opRead     = "read file"
	opWrite    = "write file"
	opMkdir    = "make directory"
	opMove     = "move"
	opRemove   = "remove"
	opSetAttr  = "set attributes"
	opDownload = "download"
	opUpload   = "upload"
	opWatch    = "watch"
)

// classes of what the kernel answers; anything else is Internal.
var classes = map[unix.Errno]dsec.Class{
	unix.ENOENT:       dsec.FileNotFound,
	unix.EISDIR:       dsec.IsADirectory,
	unix.ENOTDIR:      dsec.NotADirectory,
	unix.EEXIST:       dsec.FileExists,
	unix.ENOTEMPTY:    dsec.FileExists,
	unix.EACCES:       dsec.PermissionDenied,
	unix.EPERM:        dsec.PermissionDenied,
	unix.EROFS:        dsec.PermissionDenied,
	unix.ENOSPC:       dsec.NoSpace,
	unix.EDQUOT:       dsec.NoSpace,
	unix.EFBIG:        dsec.NoSpace,
	unix.EINVAL:       dsec.Invalid,
	unix.ENAMETOOLONG: dsec.Invalid,
	unix.ELOOP:        dsec.Invalid,
	unix.EXDEV:        dsec.Invalid,
	unix.EBUSY:        dsec.Invalid,
	unix.ETXTBSY:      dsec.Invalid,
	unix.EMLINK:       dsec.Invalid,
	unix.ENXIO:        dsec.Invalid,
	unix.ENODEV:       dsec.Invalid,
	unix.EOVERFLOW:    dsec.Invalid,
	unix.EOPNOTSUPP:   dsec.Invalid,
	unix.EMFILE:       dsec.Unavailable,
	unix.ENFILE:       dsec.Unavailable,
	unix.ENOMEM:       dsec.Unavailable,
	unix.EAGAIN:       dsec.Unavailable,
}

// fail gives err the class its errno or context stands for. An error that has
// a class keeps it; the object becomes the path that was asked for.
func fail(op, path string, err error) error {
	if err == nil {
		return nil
	}
	if e, ok := errors.AsType[*dsec.Error](err); ok {
		return e
	}
	if errno, ok := errors.AsType[unix.Errno](err); ok {
		class, known := classes[errno]
		if !known {
			class = dsec.Internal
		}
		return dsec.E(class, op, dsec.Quote(path), errno)
	}
	return dsec.E(dsec.ClassOf(err), op, dsec.Quote(path), err)
}

func invalid(op, path, format string, args ...any) error {
	return dsec.Errorf(dsec.Invalid, op, dsec.Quote(path), format, args...)
}

// source is the caller's reader, whose errors are told from those of the file
// system, and which ends with its context.
type source struct {
	ctx context.Context
	r   io.Reader
	err error // what ended it, io.EOF not counted
}

func (s *source) Read(p []byte) (int, error) {
	if err := s.ctx.Err(); err != nil {
		s.err = err
		return 0, err
	}
	n, err := s.r.Read(p)
	if err != nil && err != io.EOF {
		s.err = err
	}
	return n, err
}

// failPeer classifies an error of the caller's reader or writer: one that went
// away is Canceled, whatever it calls it.
func failPeer(op, path string, err error) error {
	if _, ok := errors.AsType[*dsec.Error](err); ok {
		return err
	}
	class := dsec.ClassOf(err)
	if class == dsec.Internal {
		class = dsec.Canceled
	}
	return dsec.E(class, op, dsec.Quote(path), err)
}

// missing reports whether err says that there is no such entry.
func missing(err error) bool { return errors.Is(err, unix.ENOENT) }

// errno strips the path of err, which the caller names itself.
func errno(err error) error {
	if e, ok := errors.AsType[*os.PathError](err); ok {
		return e.Err
	}
	return err
}

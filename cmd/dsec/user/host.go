package user

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"github.com/opendsec/dsec"
)

// hostError classifies an error of this machine's files.
func hostError(op, path string, err error) error {
	class := dsec.Invalid
	switch {
	case errors.Is(err, fs.ErrNotExist):
		class = dsec.NotFound
	case errors.Is(err, fs.ErrPermission):
		class = dsec.PermissionDenied
	}
	if e, ok := errors.AsType[*fs.PathError](err); ok {
		err = e.Err
	}
	return dsec.E(class, op, dsec.Quote(path), err)
}

func absolute(path string) string {
	a, err := filepath.Abs(path)
	if err != nil {
		return path
	}
	return a
}

func ownerOf(st os.FileInfo) (uid, gid *uint32) {
	s, ok := st.Sys().(*syscall.Stat_t)
	if !ok {
		return nil, nil
	}
	return &s.Uid, &s.Gid
}

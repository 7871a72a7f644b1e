package user

import (
	"errors"
	"io/fs"
	"os"
	"strings"

	"github.com/opendsec/dsec"
)

// source finds what a layer is to be made of: a file or a directory of this
// machine, or, with no info, what the server finds: a reference or a path of
// its own.
func source(from string) (here fs.FileInfo, there string, err error) {
	if path, ok := strings.CutPrefix(from, "server:"); ok {
		return nil, path, nil
	}
	here, err = os.Stat(from)
	switch {
	case err == nil:
		return here, "", nil
	case !isPath(from):
		return nil, from, nil
	case errors.Is(err, fs.ErrNotExist) && strings.HasPrefix(from, "~"):
		return nil, "", dsec.Errorf(dsec.NotFound, "read", dsec.Quote(from), "no such file or directory; ~ is the shell's, and only at the start of a word")
	case errors.Is(err, fs.ErrNotExist) && strings.HasSuffix(from, "/"):
		return nil, "", dsec.Errorf(dsec.NotFound, "read", dsec.Quote(from), "no such directory")
	}
	return nil, "", hostError("read", from, err)
}

// isPath tells what nobody would write for a reference.
func isPath(s string) bool {
	if s == "." || s == ".." || strings.HasSuffix(s, "/") {
		return true
	}
	for _, prefix := range []string{"./", "../", "/", "~"} {
		if strings.HasPrefix(s, prefix) {
			return true
		}
	}
	return false
}

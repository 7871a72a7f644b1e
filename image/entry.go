package image

import (
	"context"
	"fmt"
	"io"
	"path"
	"strings"

	"github.com/opendsec/dsec/image/erofs"
)

// entry is one member of a layer, whatever format it came in.
type entry struct {
	name   string // relative, clean, without ".."; "" is the root
	mode   uint32 // as st_mode
	uid    uint32
	gid    uint32
	mtime  int64
	nsec   uint32
	rdev   uint32
	size   int64
	target string // of a symbolic link, verbatim
	link   string // of a hard link: the name it shares an inode with
	isLink bool
	hides  bool // made of a whiteout
	xattrs []erofs.Xattr
	runs   []erofs.Run // the contents once they are in the data file
	node   *erofs.Node // what has the contents, if they stay where they are
}

// layerSource is one layer to apply. each calls fn for every member in order;
// r has exactly e.size bytes and is only valid in the call.
type layerSource interface {
	each(ctx context.Context, fn func(e *entry, r io.Reader) error) error
	// whiteouts reports whether names that start with .wh. have the meaning
	// that OCI gives them.
	whiteouts() bool
}

// cleanName makes a member's name relative to the root. A leading slash is
// dropped, as every unpacker does; a name that climbs is refused.
func cleanName(name string) (string, error) {
	if len(name) > erofs.MaxPath {
		return "", fmt.Errorf("name %.32q…: %d bytes, at most %d", name, len(name), erofs.MaxPath)
	}
	if strings.ContainsRune(name, 0) {
		return "", fmt.Errorf("name %q: a zero byte", name)
	}
	for part := range strings.SplitSeq(name, "/") {
		if part == ".." {
			return "", fmt.Errorf("name %q: leads out of the root", name)
		}
		if len(part) > erofs.MaxName {
			return "", fmt.Errorf("name %.32q…: a part of %d bytes, at most %d", name, len(part), erofs.MaxName)
		}
	}
	return strings.TrimPrefix(path.Clean("/"+name), "/"), nil
}

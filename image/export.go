package image

import (
	"archive/tar"
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/opendsec/dsec/image/erofs"
)

// WriteTar writes a layer as a tar that Convert makes the same tree of. With
// oci, whiteouts and opaque directories become the names that OCI gives them;
// a file that is really called so is then an error.
func WriteTar(ctx context.Context, im *erofs.Image, w io.Writer, oci bool) error {
	x := exporter{w: tar.NewWriter(w), first: map[uint64]string{}, oci: oci}
	root, err := im.Root()
	if err != nil {
		return classify("export layer", "", err)
	}
	says, err := x.saysOfRoot(root)
	if err == nil && says {
		err = x.node("", root)
	}
	if err == nil {
		err = im.Walk(func(path string, n *erofs.Node) error {
			if err := ctx.Err(); err != nil {
				return err
			}
			return x.node(path, n)
		})
	}
	if err == nil {
		err = x.w.Close()
	}
	if err != nil {
		return classify("export layer", "", err)
	}
	return nil
}

// saysOfRoot tells whether there is something to write of the root. A layer of an
// OCI image whose source said nothing says nothing.
func (x *exporter) saysOfRoot(n *erofs.Node) (bool, error) {
	xs, err := n.Xattrs()
	nothing := n.Mode == erofs.TypeDir|0o755 && n.UID == 0 && n.GID == 0 && n.Mtime == 0 && n.Nsec == 0 && len(xs) == 0
	return !x.oci || !nothing, err
}

type exporter struct {
	w     *tar.Writer
	first map[uint64]string // inode to the name under which it was written
	oci   bool
}

func (x *exporter) node(path string, n *erofs.Node) error {
	if x.oci && n.IsWhiteout() {
		dir, base := splitName(path)
		return x.w.WriteHeader(&tar.Header{Name: dir + whiteoutPrefix + base, Typeflag: tar.TypeReg})
	}
	if _, base := splitName(path); x.oci && strings.HasPrefix(base, whiteoutPrefix) {
		return fmt.Errorf("%s: OCI would take it for a whiteout", quoteName(path))
	}
	h := &tar.Header{Name: path, Mode: int64(n.Mode & 0o7777), Uid: int(n.UID), Gid: int(n.GID), ModTime: time.Unix(n.Mtime, int64(n.Nsec)),
		Format: tar.FormatPAX, PAXRecords: map[string]string{}}
	if first, ok := x.first[n.NID]; ok && n.Mode&erofs.TypeMask != erofs.TypeDir {
		h.Typeflag, h.Linkname = tar.TypeLink, first
		return x.w.WriteHeader(h)
	}
	x.first[n.NID] = path
	opaque, err := x.attributes(h, n)
	if err != nil {
		return err
	}
	known, err := typeflag(h, n)
	if err != nil || !known {
		return err
	}
	if h.Typeflag == tar.TypeDir {
		h.Name += "/"
		if path == "" {
			h.Name = "./"
		}
	}
	if err := x.w.WriteHeader(h); err != nil {
		return fmt.Errorf("%s: %w", quoteName(path), err)
	}
	if opaque {
		return x.w.WriteHeader(&tar.Header{Name: h.Name + whiteoutOpaque, Typeflag: tar.TypeReg})
	}
	if h.Typeflag != tar.TypeReg {
		return nil
	}
	r, err := n.Contents()
	if err == nil {
		_, err = io.Copy(x.w, r)
	}
	return err
}

func (x *exporter) attributes(h *tar.Header, n *erofs.Node) (opaque bool, err error) {
	xs, err := n.Xattrs()
	if err != nil {
		return false, err
	}
	for _, a := range xs {
		if x.oci && (a.Name == opaqueTrusted || a.Name == opaqueUser) {
			opaque = true
			continue
		}
		h.PAXRecords[paxXattr+a.Name] = string(a.Value)
	}
	return opaque, nil
}

// typeflag says what a tar calls the node; a socket has no name there.
func typeflag(h *tar.Header, n *erofs.Node) (known bool, err error) {
	switch n.Mode & erofs.TypeMask {
	case erofs.TypeRegular:
		h.Typeflag, h.Size = tar.TypeReg, n.Size
	case erofs.TypeDir:
		h.Typeflag = tar.TypeDir
	case erofs.TypeSymlink:
		h.Typeflag = tar.TypeSymlink
		h.Linkname, err = n.Target()
	case erofs.TypeFifo:
		h.Typeflag = tar.TypeFifo
	case erofs.TypeChar, erofs.TypeBlock:
		h.Typeflag = tar.TypeChar
		if n.Mode&erofs.TypeMask == erofs.TypeBlock {
			h.Typeflag = tar.TypeBlock
		}
		major, minor := erofs.RdevParts(n.Rdev)
		h.Devmajor, h.Devminor = int64(major), int64(minor)
	default:
		return false, nil
	}
	return true, err
}

func splitName(path string) (dir, base string) {
	for i := len(path) - 1; i >= 0; i-- {
		if path[i] == '/' {
			return path[:i+1], path[i+1:]
		}
	}
	return "", path
}

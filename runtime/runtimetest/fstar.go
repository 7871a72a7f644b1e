package runtimetest

import (
	"archive/tar"
	"context"
	"io"
	"path"
	"strings"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/files"
)

// Download writes the tree. The fake has no sparse files, xattrs or watches.
func (v *fsView) Download(ctx context.Context, dir string, w io.Writer, o files.TreeOptions) error {
	return v.do(ctx, "download", dir, func() error {
		n, err := v.fs.walk(v.u, dir, true, maxLinks)
		if err != nil {
			return err
		}
		if !n.isDir() {
			return dsec.E(dsec.NotADirectory, "download", dir, nil)
		}
		tw := tar.NewWriter(w)
		left := o.Max
		if left == 0 {
			left = 1 << 62
		}
		if err := v.pack(tw, "", n, o.Globs, &left); err != nil {
			return err
		}
		return tw.Close()
	})
}

func (v *fsView) pack(tw *tar.Writer, rel string, n *inode, globs []string, left *int64) error {
	for _, name := range sortedNames(n) {
		c, at := n.children[name], path.Join(rel, name)
		if c.isDir() {
			if len(globs) == 0 {
				if err := writeEntry(tw, at, c); err != nil {
					return err
				}
			}
			if err := v.pack(tw, at, c, globs, left); err != nil {
				return err
			}
			continue
		}
		if !matches(globs, at) || c.kind == files.Other {
			continue
		}
		if *left -= int64(len(c.data)); *left < 0 {
			return dsec.Errorf(dsec.ResourceExhausted, "download", at, "more than the allowed bytes")
		}
		if err := writeEntry(tw, at, c); err != nil {
			return err
		}
	}
	return nil
}

// matches knows "**/" at the start and path.Match for the rest.
func matches(globs []string, p string) bool {
	for _, g := range globs {
		if rest, ok := strings.CutPrefix(g, "**/"); ok {
			if m, _ := path.Match(rest, path.Base(p)); m {
				return true
			}
		}
		if m, _ := path.Match(g, p); m {
			return true
		}
	}
	return len(globs) == 0
}

func writeEntry(tw *tar.Writer, name string, n *inode) error {
	h := &tar.Header{Name: name, Mode: int64(n.mode), Uid: int(n.uid), Gid: int(n.gid), ModTime: n.mtime, Format: tar.FormatPAX}
	switch n.kind {
	case files.Dir:
		h.Typeflag, h.Name = tar.TypeDir, name+"/"
	case files.Symlink:
		h.Typeflag, h.Linkname = tar.TypeSymlink, n.target
	default:
		h.Typeflag, h.Size = tar.TypeReg, int64(len(n.data))
	}
	if err := tw.WriteHeader(h); err != nil {
		return err
	}
	_, err := tw.Write(n.data)
	return err
}

// Upload unpacks directories, files and symbolic links.
func (v *fsView) Upload(ctx context.Context, dir string, r io.Reader, o files.TreeOptions) error {
	tr := tar.NewReader(r)
	for {
		h, err := tr.Next()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return dsec.E(dsec.Invalid, "upload", dir, err)
		}
		name := path.Clean(h.Name)
		if path.IsAbs(name) || name == ".." || strings.HasPrefix(name, "../") {
			return dsec.Errorf(dsec.Invalid, "upload", dsec.Quote(h.Name), "leaves %s", dir)
		}
		if name == "." {
			continue
		}
		data, err := io.ReadAll(tr)
		if err != nil {
			return dsec.E(dsec.Invalid, "upload", name, err)
		}
		p := path.Join(dir, name)
		err = v.do(ctx, "upload", p, func() error {
			n, err := v.unpack(p, h, data)
			if err != nil {
				return err
			}
			n.uid, n.gid, n.mtime = uint32(h.Uid), uint32(h.Gid), h.ModTime
			if o.UID != nil {
				n.uid = *o.UID
			}
			if o.GID != nil {
				n.gid = *o.GID
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
}

func (v *fsView) unpack(p string, h *tar.Header, data []byte) (*inode, error) {
	if err := v.fs.mkdir(v.u, path.Dir(p), 0o755, true); err != nil {
		return nil, err
	}
	mode := uint32(h.Mode) & 0o7777
	switch h.Typeflag {
	case tar.TypeDir:
		if err := v.fs.mkdir(v.u, p, mode, true); err != nil {
			return nil, err
		}
		return v.fs.walk(v.u, p, true, maxLinks)
	case tar.TypeReg:
		return v.fs.put(v.u, p, data, false, &mode)
	case tar.TypeSymlink:
		dir, name, err := v.fs.parentOf(v.u, p)
		if err != nil {
			return nil, err
		}
		n := &inode{kind: files.Symlink, mode: 0o777, target: h.Linkname, links: 1, upper: true}
		dir.children[name] = n
		return n, nil
	}
	return nil, dsec.Errorf(dsec.Invalid, "upload", p, "entry of type %q", h.Typeflag)
}

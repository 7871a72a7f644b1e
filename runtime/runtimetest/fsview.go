package runtimetest

import (
	"archive/tar"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"path"
	"strings"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/files"
	"github.com/opendsec/dsec/runtime"
)

// fsView is a memFS as one user sees it.
type fsView struct {
	fs   *memFS
	u    user
	gone <-chan struct{}
}

// do runs fn under the lock unless the sandbox is gone or the context over.
func (v *fsView) do(ctx context.Context, op, p string, fn func() error) error {
	select {
	case <-v.gone:
		return dsec.E(dsec.SandboxGone, op, p, nil)
	default:
	}
	if err := ctx.Err(); err != nil {
		return dsec.E(dsec.ClassOf(err), op, p, err)
	}
	if !path.IsAbs(p) || strings.Contains(p, "\x00") {
		return dsec.Errorf(dsec.Invalid, op, dsec.Quote(p), "not an absolute path")
	}
	v.fs.mu.Lock()
	defer v.fs.mu.Unlock()
	err := fn()
	if e, ok := errors.AsType[*dsec.Error](err); ok { // name what was asked for
		return dsec.E(e.Class, op, p, e.Err)
	}
	return err
}

func (v *fsView) info(p string, n *inode) files.Info {
	i := files.Info{Path: p, Kind: n.kind, Size: int64(len(n.data)), Mode: n.mode, UID: n.uid, GID: n.gid, MTime: n.mtime,
		Target: n.target, Links: n.links, Owner: fmt.Sprint(n.uid), Group: fmt.Sprint(n.gid)}
	for uid, name := range map[uint32]string{0: "root", 1000: "user"} {
		if n.uid == uid {
			i.Owner = name
		}
		if n.gid == uid {
			i.Group = name
		}
	}
	return i
}

func (v *fsView) Stat(ctx context.Context, p string, follow bool) (i files.Info, err error) {
	err = v.do(ctx, "stat", p, func() error {
		n, err := v.fs.walk(v.u, p, follow, maxLinks)
		if err == nil {
			i = v.info(p, n)
		}
		return err
	})
	return i, err
}

func (v *fsView) List(ctx context.Context, p string, depth int) (out []files.Info, err error) {
	err = v.do(ctx, "list directory", p, func() error {
		n, err := v.fs.walk(v.u, p, true, maxLinks)
		switch {
		case err != nil:
			return err
		case !n.isDir():
			return dsec.E(dsec.NotADirectory, "list", p, nil)
		case !v.u.may(n, 4):
			return dsec.E(dsec.PermissionDenied, "list", p, nil)
		}
		v.list(p, n, depth, &out)
		return nil
	})
	return out, err
}

func (v *fsView) list(p string, n *inode, depth int, out *[]files.Info) {
	if depth < 1 {
		return
	}
	for _, name := range sortedNames(n) {
		at := path.Join(p, name)
		*out = append(*out, v.info(at, n.children[name]))
		v.list(at, n.children[name], depth-1, out)
	}
}

func (v *fsView) Read(ctx context.Context, p string, offset, length int64, w io.Writer) (int64, error) {
	var data []byte
	err := v.do(ctx, "read file", p, func() error {
		n, err := v.fs.walk(v.u, p, true, maxLinks)
		switch {
		case err != nil:
			return err
		case n.isDir():
			return dsec.E(dsec.IsADirectory, "read", p, nil)
		case n.kind != files.File || offset < 0:
			return dsec.Errorf(dsec.Invalid, "read", p, "not a regular file, or offset %d", offset)
		case !v.u.may(n, 4):
			return dsec.E(dsec.PermissionDenied, "read", p, nil)
		}
		data = n.data[min(offset, int64(len(n.data))):]
		return nil
	})
	if err != nil {
		return 0, err
	}
	if length >= 0 && length < int64(len(data)) {
		data = data[:length]
	}
	n, err := w.Write(data)
	return int64(n), err
}

func (v *fsView) Write(ctx context.Context, p string, r io.Reader, o files.WriteOptions) (i files.Info, err error) {
	data, err := io.ReadAll(r)
	if err != nil {
		return i, dsec.E(dsec.ClassOf(err), "write file", p, err)
	}
	if sum := sha256.Sum256(data); o.SHA256 != "" && o.SHA256 != hex.EncodeToString(sum[:]) {
		return i, dsec.Errorf(dsec.Corrupt, "write file", p, "sha256 differs")
	}
	err = v.do(ctx, "write file", p, func() error {
		who := v.u
		if o.Parents {
			if o.UID != nil {
				who.uid = *o.UID
			}
			if o.GID != nil {
				who.gid = *o.GID
			}
			if err := v.mkparents(p, who); err != nil {
				return err
			}
		}
		n, err := v.fs.put(v.u, p, data, o.Append, o.Mode)
		if err != nil {
			return err
		}
		if o.UID != nil {
			n.uid = *o.UID
		}
		if o.GID != nil {
			n.gid = *o.GID
		}
		i = v.info(p, n)
		return nil
	})
	return i, err
}

// mkparents makes missing parents as the asking user and gives them away.
func (v *fsView) mkparents(p string, owner user) error {
	var made []string
	for d := path.Dir(path.Clean(p)); d != "/"; d = path.Dir(d) {
		if _, err := v.fs.walk(v.u, d, true, maxLinks); err == nil {
			break
		}
		made = append(made, d)
	}
	if err := v.fs.mkdir(v.u, path.Dir(path.Clean(p)), 0o755, true); err != nil {
		return err
	}
	for _, d := range made {
		n, err := v.fs.walk(v.u, d, true, maxLinks)
		if err != nil {
			return err
		}
		n.uid, n.gid = owner.uid, owner.gid
	}
	return nil
}

func (v *fsView) Mkdir(ctx context.Context, p string, mode uint32, parents bool) error {
	return v.do(ctx, "make directory", p, func() error { return v.fs.mkdir(v.u, p, mode, parents) })
}

func (v *fsView) Move(ctx context.Context, from, to string) error {
	return v.do(ctx, "move", from, func() error {
		src, sname, err := v.fs.parentOf(v.u, from)
		if err != nil {
			return err
		}
		dst, dname, err := v.fs.parentOf(v.u, to)
		if err != nil {
			return err
		}
		n := src.children[sname]
		switch {
		case n == nil:
			return dsec.E(dsec.FileNotFound, "move", from, nil)
		case !v.u.may(src, 2) || !v.u.may(dst, 2):
			return dsec.E(dsec.PermissionDenied, "move", from, nil)
		case strings.HasPrefix(path.Clean(to)+"/", path.Clean(from)+"/"):
			return dsec.Errorf(dsec.Invalid, "move", from, "into itself")
		}
		if old := dst.children[dname]; old != nil {
			if old.isDir() != n.isDir() || len(old.children) > 0 {
				return dsec.E(dsec.FileExists, "move", to, nil)
			}
			v.fs.forget(path.Clean(to), old)
		}
		if !n.upper {
			v.fs.removed[path.Clean(from)] = true
		}
		v.fs.raise(n)
		dst.children[dname] = n
		delete(src.children, sname)
		return nil
	})
}

// raise makes a tree part of the upper layer.
func (fs *memFS) raise(n *inode) {
	if !n.upper {
		n.upper = true
		fs.bytes += int64(len(n.data))
	}
	for _, c := range n.children {
		fs.raise(c)
	}
}

func (v *fsView) Remove(ctx context.Context, p string, recursive bool) error {
	return v.do(ctx, "remove", p, func() error { return v.fs.remove(v.u, p, recursive) })
}

func (v *fsView) SetAttr(ctx context.Context, p string, a files.Attr) error {
	return v.do(ctx, "set attributes", p, func() error {
		n, err := v.fs.walk(v.u, p, true, maxLinks)
		if err != nil {
			return err
		}
		if v.u.uid != 0 && (v.u.uid != n.uid || a.UID != nil && *a.UID != n.uid) {
			return dsec.E(dsec.PermissionDenied, "set attributes", p, nil)
		}
		if a.Mode != nil {
			n.mode = *a.Mode & 0o7777
		}
		if a.UID != nil {
			n.uid = *a.UID
		}
		if a.GID != nil {
			n.gid = *a.GID
		}
		if a.MTime != nil {
			n.mtime = *a.MTime
		}
		v.fs.raiseOne(n)
		return nil
	})
}

func (fs *memFS) raiseOne(n *inode) {
	if !n.upper {
		n.upper = true
		fs.bytes += int64(len(n.data))
	}
}

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

// diff writes the upper layer as a tar.
func (fs *memFS) diff(w runtime.TarSink) error {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	tw := tar.NewWriter(w)
	if err := fs.diffDir(tw, "", fs.root); err != nil {
		return dsec.E(dsec.ClassOf(err), "write snapshot", "", err)
	}
	for p := range fs.removed {
		if _, err := fs.walk(user{}, p, false, maxLinks); err == nil {
			continue // made again
		}
		h := &tar.Header{Name: strings.TrimPrefix(path.Join(path.Dir(p), ".wh."+path.Base(p)), "/"), Typeflag: tar.TypeReg}
		if err := tw.WriteHeader(h); err != nil {
			return dsec.E(dsec.ClassOf(err), "write snapshot", p, err)
		}
	}
	return tw.Close()
}

func (fs *memFS) diffDir(tw *tar.Writer, rel string, n *inode) error {
	for _, name := range sortedNames(n) {
		c, at := n.children[name], path.Join(rel, name)
		if c.upper {
			if err := writeEntry(tw, at, c); err != nil {
				return err
			}
		}
		if err := fs.diffDir(tw, at, c); err != nil {
			return err
		}
	}
	return nil
}

package runtimetest

import (
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

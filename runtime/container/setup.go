package container

import (
	"context"
	"errors"
	"os"
	"path"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/hold"
	"github.com/opendsec/dsec/internal/linux"
)

// inRoot opens a path of a root that nobody has entered yet, or in which only
// the file system itself is looked at: other mounts are not crossed.
func inRoot(root *os.File, name string, flags int) (*os.File, error) {
	return linux.OpenIn(root, name, flags)
}

// setup writes what a sandbox finds about itself, and makes its working
// directory, while the root is still nobody's.
func (b *build) setup(context.Context) error {
	spec, image := b.rec.Request.Spec, b.rec.Request.Layers.Config
	own := owner{int(b.rec.UID), int(b.rec.UID)}
	etc, err := makeDirs(b.root, "/etc", own)
	if err != nil {
		return diskError("make", "/etc", err)
	}
	defer etc.Close()
	name := hostname(b.sb.id, spec)
	for _, f := range []struct {
		name    string
		content []byte
	}{{"hosts", b.lease.Hosts(name)}, {"hostname", []byte(name + "\n")}, {"resolv.conf", b.lease.ResolvConf()}} {
		if err := replaceFile(etc, f.name, f.content, own); err != nil {
			return diskError("write", "/etc/"+f.name, err)
		}
	}
	for _, dir := range []string{path.Join("/", image.Workdir), first(spec.Workdir, "/")} {
		if dir == "/" {
			continue
		}
		d, err := makeDirs(b.root, dir, own)
		if err != nil {
			return diskError("make working directory", dsec.Quote(dir), err)
		}
		d.Close()
	}
	return nil
}

// diskError tells a full disk from a root that is not what it should be.
func diskError(op, object string, err error) error {
	switch {
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		return dsec.E(dsec.NoSpace, op, object, err)
	case errors.Is(err, unix.EISDIR):
		return dsec.E(dsec.IsADirectory, op, object, err)
	case errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ELOOP), errors.Is(err, unix.EEXIST), errors.Is(err, unix.ENOENT),
		errors.Is(err, unix.ENAMETOOLONG): // EEXIST: a link that leads nowhere
		return dsec.E(dsec.NotADirectory, op, object, err)
	}
	return dsec.E(dsec.Internal, op, object, err)
}

type owner struct{ uid, gid int }

// makeDirs opens a directory, links followed inside the root, and makes what
// of it is missing.
func makeDirs(root *os.File, name string, own owner) (*os.File, error) {
	const flags = unix.O_RDONLY | unix.O_DIRECTORY
	d, err := inRoot(root, name, flags)
	if err == nil || !errors.Is(err, unix.ENOENT) {
		return d, err
	}
	parent, last := path.Split(path.Clean(name))
	if last == "" || last == ".." {
		return nil, err
	}
	p, err := makeDirs(root, parent, own)
	if err != nil {
		return nil, err
	}
	defer p.Close()
	if err := unix.Mkdirat(int(p.Fd()), last, 0o755); err != nil {
		return nil, &os.PathError{Op: "mkdir", Path: name, Err: err} // EEXIST: a dangling link
	}
	if err := unix.Fchownat(int(p.Fd()), last, own.uid, own.gid, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return nil, &os.PathError{Op: "chown", Path: name, Err: err}
	}
	return linux.OpenBeneath(p, last, flags)
}

// replaceFile puts a new file in place of whatever is there, a link included.
// Where nothing is and nothing is to be said, nothing is made.
func replaceFile(dir *os.File, name string, content []byte, own owner) error {
	fd := int(dir.Fd())
	err := unix.Unlinkat(fd, name, 0)
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return err
	}
	if err != nil && len(content) == 0 {
		return nil
	}
	n, err := unix.Openat(fd, name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_CLOEXEC, 0o644)
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(n), name)
	defer f.Close()
	if _, err := f.Write(content); err != nil {
		return err
	}
	return f.Chown(own.uid, own.gid)
}

// localeOf is the UTF-8 locale that the image has, if any.
func localeOf(root *os.File) string {
	for _, p := range []string{"/usr/lib/locale/C.utf8", "/usr/lib/locale/C.UTF-8"} {
		if f, err := inRoot(root, p, unix.O_PATH); err == nil {
			f.Close()
			return "C.UTF-8"
		}
	}
	return ""
}

// hostMounts opens what of the machine is to be shown. A path counts as what
// it resolves to, and that must be under an allowed root.
func (r *Runtime) hostMounts(want []dsec.HostMount) (mounts []hold.Mount, err error) {
	defer func() {
		if err != nil {
			for _, m := range mounts {
				m.Source.Close()
			}
			mounts = nil
		}
	}()
	for _, w := range want {
		src, err := r.openHost(w.Source)
		if err != nil {
			return mounts, err
		}
		m, err := linux.Clone(src, false)
		src.Close()
		if err != nil {
			return mounts, dsec.E(dsec.Internal, "mount host directory", dsec.Quote(w.Source), err)
		}
		mounts = append(mounts, hold.Mount{Source: m, Target: w.Target, RO: true})
		if err := linux.SetMountAttr(m, unix.MOUNT_ATTR_RDONLY|unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV); err != nil {
			return mounts, dsec.E(dsec.Internal, "mount host directory", dsec.Quote(w.Source), err)
		}
	}
	return mounts, nil
}

func (r *Runtime) openHost(name string) (*os.File, error) {
	const op = "mount host directory"
	real, err := filepath.EvalSymlinks(name)
	if err != nil {
		return nil, dsec.E(dsec.PermissionDenied, op, dsec.Quote(name), err)
	}
	for _, root := range r.cfg.HostMounts {
		root, err := filepath.EvalSymlinks(root)
		if err != nil || (real != root && !strings.HasPrefix(real, strings.TrimSuffix(root, "/")+"/")) {
			continue
		}
		dir, err := os.Open(root)
		if err != nil {
			return nil, dsec.E(dsec.Internal, op, dsec.Quote(root), err)
		}
		defer dir.Close()
		rel, err := filepath.Rel(root, real)
		if err != nil {
			return nil, dsec.E(dsec.Internal, op, dsec.Quote(name), err)
		}
		// No link on the way: what was looked at is what is opened.
		f, err := linux.OpenBeneath(dir, rel, unix.O_PATH|unix.O_DIRECTORY)
		if err != nil {
			return nil, dsec.E(dsec.PermissionDenied, op, dsec.Quote(name), err)
		}
		return f, nil
	}
	return nil, dsec.Errorf(dsec.PermissionDenied, op, dsec.Quote(name), "it is under no directory that this node allows")
}

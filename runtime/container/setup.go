package container

import (
	"cmp"
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
	own := int(b.rec.UID)
	etc, err := linux.MakeDirs(b.root, "/etc", own, own)
	if err != nil {
		return diskError("make", "/etc", err)
	}
	defer etc.Close()
	name := hostname(b.sb.ID, spec)
	for _, f := range []struct {
		name    string
		content []byte
	}{{"hosts", b.lease.Hosts(name)}, {"hostname", []byte(name + "\n")}, {"resolv.conf", b.lease.ResolvConf()}} {
		if err := linux.ReplaceFile(etc, f.name, f.content, own, own); err != nil {
			return diskError("write", "/etc/"+f.name, err)
		}
	}
	for _, dir := range []string{path.Join("/", image.Workdir), cmp.Or(spec.Workdir, "/")} {
		if dir == "/" {
			continue
		}
		d, err := linux.MakeDirs(b.root, dir, own, own)
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

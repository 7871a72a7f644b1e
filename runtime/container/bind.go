package container

import (
	"context"
	"errors"
	"os"
	"path"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/hold"
	"github.com/opendsec/dsec/internal/linux"
	"github.com/opendsec/dsec/internal/tree"
)

// inside runs fn on a thread of its own in the mount namespace of a sandbox, with its
// root.
func (r *Runtime) inside(ctx context.Context, sb *sandbox, fn func(ns *hold.Shell, root *os.File) error) error {
	ns, err := r.hold.Namespaces(ctx, string(sb.ID))
	if err != nil {
		return err
	}
	defer ns.Close()
	return linux.OnThread(func() error {
		if err := linux.JoinNS(ns.MountNS, unix.CLONE_NEWNS); err != nil {
			return err
		}
		root, err := os.OpenFile("/", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer root.Close()
		return fn(ns, root)
	})
}

// keepRoot opens the root as keep wants it.
func (r *Runtime) keepRoot(ctx context.Context, sb *sandbox) error {
	return r.inside(ctx, sb, func(_ *hold.Shell, root *os.File) error {
		plain, err := linux.Clone(root, false)
		if err == nil {
			keep(sb, plain)
		}
		return err
	})
}

// bind makes the read-only paths of the phase so, in a sandbox in which nothing runs.
func (b *build) bind(ctx context.Context) error {
	i := b.rec.phase()
	if err := b.r.keepRoot(ctx, b.sb); err != nil {
		return err
	}
	if err := b.r.rebind(ctx, b.sb, b.rec.Request.Spec.Phases[i].ReadOnly); err != nil {
		return err
	}
	return b.rerecord(func(rec *record) { rec.Settled = rec.Starts })
}

// unbind removes what was mounted on paths.
func (r *Runtime) unbind(ctx context.Context, sb *sandbox) error {
	bound := sb.record().Bound
	if len(bound) == 0 {
		return nil
	}
	err := r.inside(ctx, sb, func(_ *hold.Shell, root *os.File) error {
		for _, p := range slices.Backward(bound) {
			for range 2 * dsec.MaxPhases { // one on another, of moves that broke off
				more, err := unmount(root, p)
				if err != nil {
					return err
				}
				if !more {
					break
				}
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	return r.rerecord(sb, func(rec *record) { rec.Bound = nil })
}

// unmount removes one mount from a path, and says if there was one.
func unmount(root *os.File, p string) (bool, error) {
	dir, err := strictly(root, path.Dir(p), unix.O_PATH|unix.O_DIRECTORY)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) {
		return false, nil // then there is no mount either
	}
	if err != nil {
		return false, err
	}
	defer dir.Close()
	if err := unix.Fchdir(int(dir.Fd())); err != nil {
		return false, os.NewSyscallError("fchdir", err)
	}
	err = unix.Unmount(path.Base(p), unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) { // none there
		return false, nil
	}
	if err != nil {
		return false, &os.PathError{Op: "unmount", Path: p, Err: err}
	}
	return true, nil
}

// strictly opens a path below root without any link on the way.
func strictly(root *os.File, p string, flags int) (*os.File, error) {
	rel := strings.TrimPrefix(p, "/")
	if rel == "" {
		rel = "."
	}
	return linux.OpenBeneath(root, rel, flags)
}

// rebind mounts each read-only path on itself, and each directory above it, so that
// none of them can be renamed or removed: a mount on a name keeps the name.
func (r *Runtime) rebind(ctx context.Context, sb *sandbox, readOnly []string) error {
	const op = "make read-only"
	if len(readOnly) == 0 {
		return nil
	}
	sb.Mu.Lock()
	plain := sb.root
	sb.Mu.Unlock()
	for _, p := range readOnly {
		dir, err := strictly(plain, path.Dir(p), unix.O_RDONLY|unix.O_DIRECTORY)
		if err == nil {
			err = tree.Part(tree.Place{Dir: dir, Name: path.Base(p)})
			dir.Close()
		}
		if err != nil {
			return missing(op, p, err)
		}
	}
	all := ancestors(readOnly)
	if err := r.rerecord(sb, func(rec *record) { rec.Bound = all }); err != nil {
		return err
	}
	return r.inside(ctx, sb, func(_ *hold.Shell, root *os.File) error {
		for _, p := range all {
			if err := bindOne(root, p, slices.Contains(readOnly, p)); err != nil {
				return missing(op, p, err)
			}
		}
		return nil
	})
}

// missing tells a path that is not what its phase takes it for from a failure.
func missing(op, p string, err error) error {
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) {
		return dsec.Errorf(dsec.NotADirectory, op, dsec.Quote(p), "it is not there, or there is a symbolic link or a file on the way: %w", err)
	}
	return dsec.E(dsec.Internal, op, dsec.Quote(p), err)
}

func bindOne(root *os.File, p string, readOnly bool) error {
	at, err := strictly(root, p, unix.O_PATH)
	if err != nil {
		return err
	}
	defer at.Close()
	m, err := linux.Clone(at, true)
	if err != nil {
		return err
	}
	defer m.Close()
	if readOnly {
		if err := linux.SetMountAttrAll(m, unix.MOUNT_ATTR_RDONLY); err != nil {
			return err
		}
	}
	err = unix.MoveMount(int(m.Fd()), "", int(at.Fd()), "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH)
	if err != nil {
		return &os.PathError{Op: "attach mount", Path: p, Err: err}
	}
	return nil
}

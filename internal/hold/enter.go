package hold

import (
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/linux"
)

const defaultShm = 64 << 20

// enter gives PID 1 its root. A failure leaves a sandbox that can only be
// removed.
func (s *server) enter(w wireEnter, f *frame) error {
	sb, err := s.sandbox(w.ID)
	if err != nil {
		return err
	}
	if err := sb.alive("enter sandbox"); err != nil {
		return err
	}
	sb.mu.Lock()
	ctl := sb.ctl
	sb.ctl = nil
	sb.mu.Unlock()
	if ctl == nil {
		return dsec.Errorf(dsec.IllegalState, "enter sandbox", w.ID, "it has its root already")
	}
	defer func() { _ = ctl.Close() }()
	ctl.setReadDeadline(time.Now().Add(nativeWait))
	if err := sb.enter(ctl, w, f); err != nil {
		if e, ok := errors.AsType[*dsec.Error](err); ok {
			return e
		}
		return dsec.E(dsec.Internal, "enter sandbox", w.ID, err)
	}
	sb.mu.Lock()
	sb.entered = true
	sb.mu.Unlock()
	return nil
}

func (sb *sandbox) enter(ctl *packets, w wireEnter, f *frame) error {
	a, fs, err := ctl.answer()
	if err != nil {
		return fmt.Errorf("wait for PID 1: %w", err)
	}
	defer closeAll(fs)
	if !a.ok() {
		return fmt.Errorf("%s: %w", a.stepName(), a.errno())
	}
	in := planInput{e: w, idCount: sb.spec.Count, shmSize: w.ShmSize}
	if in.shmSize == 0 {
		in.shmSize = defaultShm
	}
	own, err := in.collect(w, f, fs, sb.pid)
	defer closeAll(own)
	if err != nil {
		return err
	}
	p, err := compilePlan(in)
	if err != nil {
		return dsec.E(dsec.Invalid, "enter sandbox", sb.spec.ID, err)
	}
	if err := ctl.send(p.b, p.files); err != nil {
		return fmt.Errorf("send plan to PID 1: %w", err)
	}
	a, more, err := ctl.answer()
	closeAll(more)
	switch {
	case err != nil:
		return fmt.Errorf("wait for PID 1: %w", err)
	case a.ok():
		return nil
	}
	words := a.stepName()
	if i := int(a.Step) - stepPlan; i >= 0 && i < len(p.words) {
		words = p.words[i]
	}
	return dsec.Errorf(planClass(a.errno()), "enter sandbox", sb.spec.ID, "%s: %w", words, a.errno())
}

// planClass: an image may have a link or a file where a directory must be.
func planClass(err error) dsec.Class {
	switch {
	case errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ELOOP), errors.Is(err, unix.EISDIR):
		return dsec.Invalid
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		return dsec.NoSpace
	}
	return dsec.Internal
}

// collect puts the descriptors of the request and the mounts we make in their
// places; own are to be closed.
func (in *planInput) collect(w wireEnter, f *frame, fs []*os.File, pid int) (own []*os.File, err error) {
	i := 0
	next := func() (*os.File, error) { i++; return f.take(i - 1) }
	if in.root, err = next(); err != nil {
		return own, err
	}
	if w.HasDev {
		if in.dev, err = next(); err != nil {
			return own, err
		}
	}
	for _, m := range w.Mounts {
		var src *os.File
		isDir := true
		if m.HasSource {
			if src, err = next(); err != nil {
				return own, err
			}
			var st unix.Stat_t
			if err := unix.Fstat(fdOf(src), &st); err != nil {
				return own, err
			}
			isDir = st.Mode&unix.S_IFMT == unix.S_IFDIR
			if err := restrict(src, m); err != nil {
				return own, err
			}
		}
		in.mounts, in.mountIsDir = append(in.mounts, src), append(in.mountIsDir, isDir)
	}
	if len(fs) == 0 {
		return own, fmt.Errorf("PID 1 sent no proc")
	}
	if in.proc, err = fsmountFrom(fs[0], walled|unix.MOUNT_ATTR_NOEXEC); err != nil {
		return own, err
	}
	own = append(own, in.proc)
	if len(fs) > 1 {
		in.sys, err = fsmountFrom(fs[1], walled|unix.MOUNT_ATTR_NOEXEC|unix.MOUNT_ATTR_RDONLY)
	} else {
		in.sys, err = sysfsOf(pid)
	}
	if err != nil {
		return own, err
	}
	own = append(own, in.sys)
	if len(w.Masks) > 0 {
		if in.null, err = linux.CloneAt(nil, os.DevNull); err != nil {
			return own, err
		}
		own = append(own, in.null)
	}
	return own, nil
}

// restrict sets what a Mount says on the detached mount it came with.
func restrict(src *os.File, m wireMount) error {
	attr := uint64(walled)
	if m.RO {
		attr |= unix.MOUNT_ATTR_RDONLY
	}
	if !m.Exec {
		attr |= unix.MOUNT_ATTR_NOEXEC
	}
	return linux.SetMountAttrAll(src, attr)
}

// fsmountFrom mounts what PID 1 configured. It may not do so itself: the kernel
// wants to see a proc and a sysfs that are as visible in the mount namespace of
// the caller, and PID 1's holds nothing.
func fsmountFrom(fs *os.File, attrs int) (*os.File, error) {
	var fd int
	err := noEINTR(func() (err error) {
		fd, err = unix.Fsmount(fdOf(fs), unix.FSMOUNT_CLOEXEC, attrs)
		return err
	})
	if err != nil {
		return nil, os.NewSyscallError("fsmount", err)
	}
	return os.NewFile(uintptr(fd), "mount"), nil
}

// sysfsOf mounts the sysfs of a network namespace that is not PID 1's own.
func sysfsOf(pid int) (m *os.File, err error) {
	err = linux.OnThread(func() error {
		ns, err := os.Open(fmt.Sprintf("/proc/%d/ns/net", pid))
		if err != nil {
			return err
		}
		defer func() { _ = ns.Close() }()
		if err := linux.JoinNS(ns, unix.CLONE_NEWNET); err != nil {
			return err
		}
		m, err = linux.NewFS("sysfs").Mount(walled | unix.MOUNT_ATTR_NOEXEC | unix.MOUNT_ATTR_RDONLY)
		return err
	})
	return m, err
}

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

// prepare has PID 1 make what needs no root.
func (sb *sandbox) prepare(ctl *packets, sys *os.File) {
	defer close(sb.prepared)
	m := shellMounts{sys: sys}
	defer func() { closeAll([]*os.File{m.dev, m.proc, m.sys}) }()
	ctl.setReadDeadline(time.Now().Add(nativeWait))
	sb.unready = sb.makeReady(ctl, &m)
	sb.has = [3]bool{m.dev != nil, true, m.sys != nil}
}

func (sb *sandbox) makeReady(ctl *packets, m *shellMounts) (err error) {
	if !sb.spec.Bare { // while PID 1 is on its way
		if m.dev, err = makeDev(sb.spec.UIDBase, sb.spec.GIDBase, sb.shm()); err != nil {
			return err
		}
	}
	fs, err := expect(ctl, nil)
	if err != nil {
		return err
	}
	defer closeAll(fs)
	if len(fs) == 0 {
		return errors.New("PID 1 sent no proc")
	}
	if m.proc, err = fsmountFrom(fs[0], walled|unix.MOUNT_ATTR_NOEXEC); err != nil {
		return err
	}
	p, err := preparePlan(&sb.spec, *m)
	if err != nil {
		return err
	}
	return run(ctl, p)
}

func (sb *sandbox) shm() int64 {
	if sb.spec.ShmSize == 0 {
		return defaultShm
	}
	return sb.spec.ShmSize
}

// expect reads one answer and makes an error of a bad one; p explains the
// steps of a plan.
func expect(ctl *packets, p *plan) ([]*os.File, error) {
	a, files, err := ctl.answer()
	switch {
	case err != nil:
		return nil, fmt.Errorf("wait for PID 1: %w", err)
	case a.ok():
		return files, nil
	}
	closeAll(files)
	words, errno := a.stepName(), a.errno()
	if i := int(a.Step) - stepPlan; p != nil && i >= 0 && i < len(p.words) {
		words = p.words[i]
		if p.kinds[i] == planMove && errno == unix.EINVAL { // how the kernel says that it is a file
			errno = unix.ENOTDIR
		}
	}
	return nil, fmt.Errorf("%s: %w", words, errno)
}

// run has PID 1 carry out a plan.
func run(ctl *packets, p *plan) error {
	if err := ctl.send(p.b, p.files); err != nil {
		return fmt.Errorf("send plan to PID 1: %w", err)
	}
	files, err := expect(ctl, p)
	closeAll(files)
	return err
}

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
	if w.As != "" {
		if err := s.rename(sb, w.As); err != nil {
			return err
		}
	}
	<-sb.prepared // within nativeWait
	if err = sb.unready; err == nil {
		ctl.setReadDeadline(time.Now().Add(nativeWait))
		err = sb.enter(ctl, w, f)
	}
	if e, ok := errors.AsType[*dsec.Error](err); ok {
		return e
	}
	if err != nil {
		return dsec.E(enterClass(err), "enter sandbox", sb.name(), err)
	}
	sb.mu.Lock()
	sb.entered = true
	sb.mu.Unlock()
	return nil
}

// rename gives a shell the id of the sandbox it becomes.
func (s *server) rename(sb *sandbox, id string) error {
	if !validID(id) {
		return dsec.Errorf(dsec.Invalid, "enter sandbox", dsec.Quote(id), "not a valid id")
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.sandboxes[id] != nil {
		return dsec.E(dsec.AlreadyExists, "enter sandbox", id, nil)
	}
	delete(s.sandboxes, sb.name())
	s.sandboxes[id] = sb
	sb.ident.Store(&id)
	return nil
}

func (sb *sandbox) enter(ctl *packets, w wireEnter, f *frame) error {
	root, err := f.take(0)
	if err != nil {
		return err
	}
	mounts, isDir, err := w.collect(f)
	if err != nil {
		return err
	}
	p, err := enterPlan(&w, root, mounts, isDir, sb.has)
	if err != nil {
		return dsec.E(dsec.Invalid, "enter sandbox", sb.name(), err)
	}
	return run(ctl, p)
}

// enterClass: an image may have a link or a file where a directory must be.
func enterClass(err error) dsec.Class {
	switch {
	case errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ELOOP), errors.Is(err, unix.EISDIR):
		return dsec.Invalid
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		return dsec.NoSpace
	}
	return dsec.Internal
}

// collect finds the sources of extra mounts, which come after the root, and
// restricts them.
func (w *wireEnter) collect(f *frame) (mounts []*os.File, isDir []bool, err error) {
	i := 0
	for _, m := range w.Mounts {
		var src *os.File
		dir := true
		if m.HasSource {
			i++
			if src, err = f.take(i); err != nil {
				return nil, nil, err
			}
			var st unix.Stat_t
			if err := unix.Fstat(fdOf(src), &st); err != nil {
				return nil, nil, err
			}
			dir = st.Mode&unix.S_IFMT == unix.S_IFDIR
			if err := restrict(src, m); err != nil {
				return nil, nil, err
			}
		}
		mounts, isDir = append(mounts, src), append(isDir, dir)
	}
	return mounts, isDir, nil
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
// wants to see a proc that is as visible in the mount namespace of the caller,
// and PID 1's holds nothing.
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

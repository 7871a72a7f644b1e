package microvm

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/diskpool"
	"github.com/opendsec/dsec/internal/fault"
	"github.com/opendsec/dsec/internal/lifecycle"
	"github.com/opendsec/dsec/internal/linux"
	"github.com/opendsec/dsec/internal/within"
	"github.com/opendsec/dsec/runtime/microvm/vmm"
	"github.com/opendsec/dsec/runtime/tier"
)

// momentPrefix begins what a moment has in the disk pool, after Prefix: no id begins so.
const momentPrefix = "moment."

func momentDisk(name string) string { return Prefix + momentPrefix + name }

// checkMoment: the name of a moment is one of a file and of a disk.
func checkMoment(name string) error {
	good := name != "" && len(name) <= 60
	for _, c := range []byte(name) {
		good = good && (c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9')
	}
	if !good {
		return dsec.Errorf(dsec.Invalid, "check", "name of a moment", "%s: 1 to 60 letters and digits", dsec.Quote(name))
	}
	return nil
}

// moments is the directory of the machines' states.
func (r *Runtime) moments() string { return filepath.Join(r.cfg.Dir, "moments") }

func (r *Runtime) moment(name string) string { return filepath.Join(r.moments(), name) }

// KeepMoment implements runtime.Forker. What runs in the sandbox is frozen before its machine is
// stopped, so that no copy runs anything before it is told who it is.
func (r *Runtime) KeepMoment(ctx context.Context, id dsec.SandboxID, name string) error {
	const op = "keep moment of sandbox"
	if err := checkMoment(name); err != nil {
		return err
	}
	sb, err := r.boxes.Acquire(ctx, op, id)
	if err != nil {
		return err
	}
	defer sb.Leave()
	if _, err := r.boxes.Live(op, id); err != nil {
		return err
	}
	if err := r.bringBackInTurn(ctx, sb); err != nil {
		return err
	}
	return tier.Wrap(op, id, r.explain(op, sb, r.keepMoment(ctx, sb, name)))
}

func (r *Runtime) keepMoment(ctx context.Context, sb *sandbox, name string) error {
	sb.Mu.Lock()
	m := sb.machine
	sb.Mu.Unlock()
	if m == nil {
		return dsec.Errorf(dsec.SandboxGone, "keep moment of sandbox", string(sb.ID), "the sandbox has ended")
	}
	r.mu.Lock()
	_, taken := r.kept[name]
	r.mu.Unlock()
	if taken {
		return dsec.Errorf(dsec.AlreadyExists, "keep moment", name, "there is one of that name")
	}
	c, err := r.session(ctx, sb)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(r.moments(), 0o700); err != nil {
		return dsec.E(fault.Class(err, dsec.Internal), "make directory", r.moments(), err)
	}
	if err := r.freeze(ctx, sb, c, true); err != nil {
		return err
	}
	// Also when the caller has gone: the sandbox is left as it was.
	late, cancel := context.WithTimeout(context.WithoutCancel(ctx), freezeTime)
	defer cancel()
	if err = m.Pause(ctx); err == nil {
		err = r.writeMoment(ctx, sb, m, name)
		err = errors.Join(err, m.Resume(late))
	}
	err = errors.Join(err, r.goOn(ctx, sb))
	if err != nil {
		err = errors.Join(err, r.DropMoment(late, name))
	}
	return err
}

// writeMoment writes what a machine that stands still is.
func (r *Runtime) writeMoment(ctx context.Context, sb *sandbox, m vmm.VM, name string) error {
	if err := r.copyDisk(ctx, shared(sb.ID), momentDisk(name), sb.record().Request.Spec.Limits.Disk); err != nil {
		return err
	}
	if err := m.Snapshot(ctx, r.moment(name)); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.kept[name] = momentOf(sb.record())
	return nil
}

// DropMoment implements runtime.Forker.
func (r *Runtime) DropMoment(ctx context.Context, name string) error {
	const op = "drop moment"
	if err := checkMoment(name); err != nil {
		return err
	}
	r.mu.Lock()
	delete(r.kept, name)
	r.mu.Unlock()
	if err := r.disks.Remove(ctx, momentDisk(name)); err != nil {
		return err
	}
	if err := os.RemoveAll(r.moment(name)); err != nil {
		return dsec.E(dsec.Internal, op, name, err)
	}
	_ = os.Remove(r.moments()) // if it was the last
	return nil
}

// dropMoments drops those of an earlier process: whoever they were for has gone.
func (r *Runtime) dropMoments(ctx context.Context, disks []string) error {
	var errs []error
	for _, name := range disks {
		if strings.HasPrefix(name, momentDisk("")) {
			errs = append(errs, r.disks.Remove(ctx, name))
		}
	}
	if err := os.RemoveAll(r.moments()); err != nil {
		errs = append(errs, dsec.E(dsec.Internal, "drop moments", r.moments(), err))
	}
	return errors.Join(errs...)
}

// copyDisk makes a disk with the content of another, whose machine stands still.
func (r *Runtime) copyDisk(ctx context.Context, from, to string, limit int64) (err error) {
	const op = "copy disk"
	src, err := r.disks.Open(ctx, from)
	if err != nil {
		return err
	}
	defer func() { _ = src.Close() }()
	dst, err := r.disks.Create(ctx, to, poolLimit(limit), diskpool.Owner{})
	if err != nil {
		return err
	}
	defer func() { _ = dst.Close() }()
	if err := copyFile(ctx, src, dst); err != nil {
		return errors.Join(dsec.E(fault.Class(err, dsec.Internal), op, from, err), r.disks.Remove(context.WithoutCancel(ctx), to))
	}
	return nil
}

func copyFile(ctx context.Context, src, dst *os.File) error {
	in, err := os.Open(diskPath(src))
	if err != nil {
		return err
	}
	defer func() { _ = in.Close() }()
	out, err := os.OpenFile(diskPath(dst), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() { _ = out.Close() }()
	linux.WriteInPlace(out)
	if err := unix.IoctlFileClone(int(out.Fd()), int(in.Fd())); err == nil {
		return nil
	}
	return copyData(ctx, in, out)
}

// copyData copies what is no hole.
func copyData(ctx context.Context, in, out *os.File) error {
	st, err := in.Stat()
	if err != nil {
		return err
	}
	if err := out.Truncate(st.Size()); err != nil {
		return err
	}
	for off := int64(0); ; {
		begin, err := unix.Seek(int(in.Fd()), off, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return nil // no more data
		}
		if err != nil {
			return os.NewSyscallError("lseek", err)
		}
		end, err := unix.Seek(int(in.Fd()), begin, unix.SEEK_HOLE)
		if err != nil {
			return os.NewSyscallError("lseek", err)
		}
		if _, err := out.Seek(begin, io.SeekStart); err != nil {
			return err
		}
		if _, err := io.Copy(out, within.Reader(ctx, io.NewSectionReader(in, begin, end-begin))); err != nil {
			return err
		}
		off = end
	}
}

// fork are the steps of a creation that goes on from a moment, behind the one that writes the state.
func (b *build) fork() []lifecycle.Step {
	name, from := shared(b.sb.ID), b.rec.Request.From
	steps := []lifecycle.Step{{Name: "disk", Do: func(ctx context.Context) error {
		b.r.mu.Lock()
		m, ok := b.r.kept[from]
		b.r.mu.Unlock()
		if !ok {
			return dsec.Errorf(dsec.NotFound, "find moment", from, "it was not kept, or is dropped")
		}
		b.from, b.read = b.r.moment(from), m.read
		return b.r.copyDisk(ctx, momentDisk(from), name, b.rec.Request.Spec.Limits.Disk)
	}, Undo: func(ctx context.Context) error { return b.r.disks.Remove(ctx, name) }}}
	for _, s := range b.begin() {
		switch s.Name {
		case "machine":
			s.Do = b.restore
		case "resume":
			s.Do = b.goOn
		case "root": // it has one
			continue
		case "main": // it runs, if there is one
			s.Do = b.done
		}
		steps = append(steps, s)
	}
	return steps
}

// restore starts a machine that was written, paused, with devices like those it had.
func (b *build) restore(ctx context.Context) error {
	dir, err := b.r.disks.Open(ctx, shared(b.sb.ID))
	if err != nil {
		return err
	}
	defer func() { _ = dir.Close() }()
	m, err := b.machinery.VMM.Restore(ctx, b.from, vmm.Devices{Name: string(b.sb.ID), Pmem: b.layers.slots, Disk: diskPath(dir), Blocks: b.layers.blocks, Tap: b.tap})
	if err != nil {
		return err
	}
	b.sb.Mu.Lock()
	b.sb.machine = m
	b.sb.Mu.Unlock()
	return nil
}

// goOn lets the machine of a copy go on, and tells it who it is.
func (b *build) goOn(ctx context.Context) error {
	b.sb.Mu.Lock()
	m := b.sb.machine
	b.sb.Mu.Unlock()
	if err := m.Resume(ctx); err != nil {
		return err
	}
	return b.r.begin(ctx, b.sb, b.rec)
}

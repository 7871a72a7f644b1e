package fullvm

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/failpoint"
	"github.com/opendsec/dsec/internal/fault"
	"github.com/opendsec/dsec/internal/lifecycle"
	"github.com/opendsec/dsec/internal/linux"
	"github.com/opendsec/dsec/internal/qcow2"
	"github.com/opendsec/dsec/internal/within"
	"github.com/opendsec/dsec/runtime"
	"github.com/opendsec/dsec/runtime/microvm/vmm"
	"github.com/opendsec/dsec/runtime/tier"
)

const (
	markPrefix = "mark-"
	oldSuffix  = ".old"
	newSuffix  = ".new"
	revertFile = "revert.qcow2"
	maxMarks   = 32
)

func checkMark(op, name string) error {
	if vmm.CheckName(name) != nil || strings.HasSuffix(name, oldSuffix) {
		return dsec.Errorf(dsec.Invalid, op, dsec.Quote(name), "the name of a mark has 1 to 60 of letters, digits, _ . and -, and no %s at its end", oldSuffix)
	}
	return nil
}

// Mark keeps what a machine is: memory and devices as a snapshot, and the disk of the same moment.
func (r *Runtime) Mark(ctx context.Context, id dsec.SandboxID, name string) (err error) {
	const op = "mark sandbox"
	if err := checkMark(op, name); err != nil {
		return err
	}
	sb, err := r.acquire(ctx, op, id)
	if err != nil {
		return err
	}
	defer sb.Leave()
	_, vm, err := r.live(op, id)
	if err != nil {
		return err
	}
	dir, err := r.cfg.Disks.Open(ctx, string(id))
	if err != nil {
		return tier.Wrap(op, id, err)
	}
	defer func() { _ = dir.Close() }()
	all, err := marks(dir)
	if err != nil {
		return tier.Wrap(op, id, err)
	}
	if len(all) >= maxMarks && !slices.Contains(all, name) {
		return dsec.Errorf(dsec.ResourceExhausted, op, string(id), "it has %d marks already", maxMarks)
	}
	at := inside(dir, markPrefix+name)
	if err := clearMark(at); err != nil {
		return tier.Wrap(op, id, err)
	}
	if err := vm.Pause(ctx); err != nil {
		return tier.Wrap(op, id, err)
	}
	if !sb.IsPaused() {
		defer func() {
			late, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*answerTime)
			defer cancel()
			err = errors.Join(err, tier.Wrap(op, id, r.goOn(late, sb)))
		}()
	}
	if err := take(ctx, vm, dir, at); err != nil {
		return tier.Wrap(op, id, errors.Join(err, restoreMark(at)))
	}
	if err := os.RemoveAll(at + oldSuffix); err != nil {
		return tier.Wrap(op, id, dsec.E(dsec.Internal, "remove", name, err))
	}
	return nil
}

// clearMark moves what has the name aside, until there is another one.
func clearMark(at string) error {
	if err := errors.Join(removeTemp(filepath.Dir(at)), os.RemoveAll(at+oldSuffix)); err != nil {
		return dsec.E(dsec.Internal, "remove", "old mark", err)
	}
	if err := os.Rename(at, at+oldSuffix); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return dsec.E(dsec.Internal, "set aside", "old mark", err)
	}
	return nil
}

func restoreMark(at string) error {
	if err := os.RemoveAll(at); err != nil {
		return err
	}
	if err := os.Rename(at+oldSuffix, at); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// settleMarks undoes what a killed process was in the middle of.
func (r *Runtime) settleMarks(ctx context.Context, sb *sandbox) error {
	dir, err := r.cfg.Disks.Open(ctx, string(sb.ID))
	if err != nil {
		return err
	}
	defer func() { _ = dir.Close() }()
	entries, err := os.ReadDir(inside(dir, "."))
	errs := []error{err, removeTemp(inside(dir, ".")), removed(inside(dir, revertFile)), removed(inside(dir, revertFile+newSuffix))}
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), markPrefix) || strings.HasSuffix(e.Name(), oldSuffix) {
			continue
		}
		if _, err := os.Stat(inside(dir, filepath.Join(e.Name(), diskFile))); err != nil {
			errs = append(errs, os.RemoveAll(inside(dir, e.Name())))
		}
	}
	for _, e := range entries {
		if name, ok := strings.CutSuffix(e.Name(), oldSuffix); ok && strings.HasPrefix(name, markPrefix) {
			if _, err := os.Stat(inside(dir, name)); err == nil {
				errs = append(errs, os.RemoveAll(inside(dir, e.Name())))
			} else {
				errs = append(errs, os.Rename(inside(dir, e.Name()), inside(dir, name)))
			}
		}
	}
	if err := errors.Join(errs...); err != nil {
		return dsec.E(dsec.Internal, "settle marks of", string(sb.ID), err)
	}
	return nil
}

// removeTemp removes what a killed process left of a snapshot.
func removeTemp(dir string) error {
	found, err := filepath.Glob(filepath.Join(dir, ".tmp-*"))
	for _, at := range found {
		err = errors.Join(err, os.RemoveAll(at))
	}
	return err
}

// take writes the mark of a machine that stands still. With the state QEMU has written all it knew of the disk.
func take(ctx context.Context, vm vmm.VM, dir *os.File, at string) error {
	if err := vm.Snapshot(ctx, at); err != nil {
		return err
	}
	if err := failpoint.Hit(ctx, "fullvm.mark.taken"); err != nil {
		return err
	}
	return copyDisk(ctx, inside(dir, diskFile), filepath.Join(at, diskFile))
}

// copyDisk copies a file so that it is whole when it has its name: without its blocks where the file
// system can, else what of it is no hole.
func copyDisk(ctx context.Context, from, to string) (err error) {
	const op, object = "copy", "disk of a virtual machine"
	in, err := os.Open(from)
	if err != nil {
		return dsec.E(fault.Class(err, dsec.Internal), op, object, err)
	}
	defer func() { _ = in.Close() }()
	tmp := to + newSuffix
	out, err := os.OpenFile(tmp, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return dsec.E(fault.Class(err, dsec.Internal), op, object, err)
	}
	defer func() {
		_ = out.Close()
		if err != nil {
			_ = os.Remove(tmp)
		}
	}()
	linux.WriteInPlace(out)
	if unix.IoctlFileClone(int(out.Fd()), int(in.Fd())) != nil {
		if err := copySparse(ctx, out, in); err != nil {
			return dsec.E(fault.Class(err, dsec.ClassOf(err)), op, object, err)
		}
	}
	if err := os.Rename(tmp, to); err != nil {
		return dsec.E(dsec.Internal, op, object, err)
	}
	return nil
}

func copySparse(ctx context.Context, out, in *os.File) error {
	st, err := in.Stat()
	if err != nil {
		return err
	}
	if err := out.Truncate(st.Size()); err != nil {
		return err
	}
	for at := int64(0); at < st.Size(); {
		data, err := unix.Seek(int(in.Fd()), at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return nil // nothing but a hole follows
		}
		if err != nil {
			return err
		}
		end, err := unix.Seek(int(in.Fd()), data, unix.SEEK_HOLE)
		if err != nil {
			return err
		}
		if _, err := io.Copy(io.NewOffsetWriter(out, data), within.Reader(ctx, io.NewSectionReader(in, data, end-data))); err != nil {
			return err
		}
		at = end
	}
	return nil
}

// marks are the names of those that are whole, in order.
func marks(dir *os.File) (all []string, err error) {
	entries, err := os.ReadDir(inside(dir, "."))
	if err != nil {
		return nil, dsec.E(dsec.Internal, "list", "marks", err)
	}
	for _, e := range entries {
		name, ok := strings.CutPrefix(e.Name(), markPrefix)
		if !ok || strings.HasSuffix(name, oldSuffix) {
			continue
		}
		if _, err := os.Stat(inside(dir, filepath.Join(e.Name(), diskFile))); err == nil {
			all = append(all, name)
		}
	}
	return all, nil
}

// Marks lists the names.
func (r *Runtime) Marks(ctx context.Context, id dsec.SandboxID) ([]string, error) {
	const op = "list marks"
	if _, err := r.boxes.Find(op, id); err != nil {
		return nil, err
	}
	dir, err := r.cfg.Disks.Open(ctx, string(id))
	if err != nil {
		return nil, tier.Wrap(op, id, err)
	}
	defer func() { _ = dir.Close() }()
	all, err := marks(dir)
	return all, tier.Wrap(op, id, err)
}

// Revert puts a machine in the place of the one there is. After an error before that, it goes on as it was; after
// one later, the sandbox has ended, and its disk is that of the mark.
func (r *Runtime) Revert(ctx context.Context, id dsec.SandboxID, name string) error {
	const op = "revert sandbox"
	if err := checkMark(op, name); err != nil {
		return err
	}
	sb, err := r.acquire(ctx, op, id)
	if err != nil {
		return err
	}
	defer sb.Leave()
	if _, _, err := r.live(op, id); err != nil {
		return err
	}
	b := &build{r: r, sb: sb, rec: sb.record()}
	defer b.close()
	if b.dir, err = r.cfg.Disks.Open(ctx, string(id)); err != nil {
		return tier.Wrap(op, id, err)
	}
	at := inside(b.dir, markPrefix+name)
	if _, err := os.Stat(filepath.Join(at, diskFile)); err != nil {
		return dsec.Errorf(dsec.NotFound, op, string(id), "it has no mark %s", dsec.Quote(name))
	}
	if err := errors.Join(r.cfg.Machines.CheckSnapshot(ctx, at), checkDisk(filepath.Join(at, diskFile), b.rec.Image.Size)); err != nil {
		return tier.Wrap(op, id, err)
	}
	if err := r.useLayers(ctx, sb, b.rec); err != nil {
		return tier.Wrap(op, id, err)
	}
	if b.base, err = r.openBase(sb, b.rec); err != nil {
		return tier.Wrap(op, id, err)
	}
	if err := copyDisk(ctx, filepath.Join(at, diskFile), inside(b.dir, revertFile)); err != nil {
		return tier.Wrap(op, id, err)
	}
	sb.Mu.Lock()
	sb.Stopping = true
	sb.said = appendConsole(sb.said, sb.vm.Console())
	sb.said = sb.said[max(0, len(sb.said)-maxConsole):]
	sb.Mu.Unlock()
	r.kill(sb)
	if err := b.reverted(ctx, at); err != nil {
		r.kill(sb)
		sb.Mu.Lock()
		sb.Stopping = false
		sb.Mu.Unlock()
		r.end(sb, runtime.Exit{Cause: dsec.CauseUnknown, By: dsec.InducedByPlatform, Evidence: []string{"it was to be reverted to " + name + ": " + err.Error()}})
		return tier.Wrap(op, id, err)
	}
	return nil
}

// checkDisk says whether QEMU would open the disk of a mark: who finds out after the machine has been killed has neither.
func checkDisk(name string, size int64) error {
	const op, object = "check", "disk of a mark"
	f, err := os.Open(name)
	if err != nil {
		return dsec.E(fault.Class(err, dsec.Internal), op, object, err)
	}
	defer func() { _ = f.Close() }()
	st, err := f.Stat()
	if err != nil {
		return dsec.E(dsec.Internal, op, object, err)
	}
	i, err := qcow2.Open(f, st.Size())
	switch {
	case err != nil:
		return dsec.E(dsec.Corrupt, op, object, err)
	case i.Size() != size:
		return dsec.Errorf(dsec.Corrupt, op, object, "it has %d bytes, and that of its sandbox %d", i.Size(), size)
	}
	return nil
}

func (b *build) reverted(ctx context.Context, at string) error {
	if err := os.Rename(inside(b.dir, revertFile), inside(b.dir, diskFile)); err != nil {
		return dsec.E(dsec.Internal, "revert", diskFile, err)
	}
	s, err := b.r.shape(b.rec)
	if err != nil {
		return err
	}
	vm, err := b.r.cfg.Machines.Restore(ctx, at, vmm.Devices{Name: b.sb.machine(), Disk: inside(b.dir, diskFile), Base: b.base.disk, Firmware: s.Kernel.Path})
	if err != nil {
		return err
	}
	if err := b.update(func(rec *record) { rec.Paused = false }); err != nil {
		vm.Kill()
		return err
	}
	if err := vm.Resume(ctx); err != nil {
		vm.Kill()
		return err
	}
	if err := b.r.attend(b.sb, vm); err != nil {
		return err
	}
	if !b.rec.Image.Agent {
		return nil
	}
	actx, cancel := context.WithTimeout(ctx, 3*lifecycle.UndoLimit)
	defer cancel()
	_, err = b.sb.await(actx)
	return err
}

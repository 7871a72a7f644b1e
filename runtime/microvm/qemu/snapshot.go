package qemu

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/fault"
	"github.com/opendsec/dsec/internal/within"
	"github.com/opendsec/dsec/runtime/microvm/vmm"
)

// Snapshot writes all of the machine: the memory of a clone is its own by now, and
// cannot be left to the template.
func (m *machine) Snapshot(ctx context.Context, dir string) (err error) {
	const op = "snapshot"
	m.op.Lock()
	defer m.op.Unlock()
	if _, err := os.Lstat(dir); !errors.Is(err, fs.ErrNotExist) {
		return dsec.E(dsec.AlreadyExists, op, dir, err)
	}
	status, err := m.status(ctx)
	switch {
	case err != nil:
		return err
	case status == "postmigrate":
		return dsec.Errorf(dsec.IllegalState, op, dir, "there was a snapshot, and the machine has not run since")
	case status != "running" && status != "paused":
		return dsec.Errorf(dsec.IllegalState, op, dir, "the machine is %s", dsec.Quote(status))
	}
	work, err := os.MkdirTemp(filepath.Dir(dir), ".tmp-snapshot-")
	if err != nil {
		return dsec.E(fault.Class(err, dsec.Internal), op, dir, cause(err))
	}
	defer func() { _ = os.RemoveAll(work) }()
	if status == "running" {
		defer func() {
			// Also when the caller has gone, perhaps while it was being stopped: the machine is left as it was.
			err = errors.Join(err, m.call(context.WithoutCancel(ctx), "cont", nil, nil))
		}()
		if err := m.call(ctx, "stop", nil, nil); err != nil {
			return err
		}
	}
	if err := m.shareMemory(ctx, false); err != nil {
		return err
	}
	man := manifest{Format: format, Kind: kindSnapshot, Identity: m.ident}
	man.State, err = writeTo(work, "state", func(f *os.File) (content, error) {
		return m.save(ctx, f, maxState(kindSnapshot, m.ident.Memory))
	})
	if err != nil {
		return err
	}
	return publish(ctx, work, dir, man)
}

// openSnapshot reads a snapshot to its end, and returns it at its beginning if it is whole.
func openSnapshot(ctx context.Context, op, dir string) (man manifest, _ *os.File, err error) {
	if man, err = readManifest(dir, kindSnapshot); err != nil {
		return man, nil, dsec.E(dsec.ClassOf(err), op, dir, err)
	}
	state, err := openState(dir, man.State)
	if err != nil {
		return man, nil, err
	}
	defer func() {
		if err != nil {
			_ = state.Close()
		}
	}()
	h := sha256.New()
	if _, err := io.Copy(h, within.Reader(ctx, state)); err != nil {
		return man, nil, dsec.E(readClass(err), op, state.Name(), cause(err))
	}
	if hex.EncodeToString(h.Sum(nil)) != man.State.SHA256 {
		return man, nil, dsec.Errorf(dsec.Corrupt, op, state.Name(), "its digest is not that of its manifest")
	}
	if _, err := state.Seek(0, io.SeekStart); err != nil {
		return man, nil, dsec.E(dsec.Internal, op, state.Name(), cause(err))
	}
	return man, state, nil
}

// CheckSnapshot says whether Restore would take one: that it is whole, and of such a QEMU.
func (d *Driver) CheckSnapshot(ctx context.Context, dir string) error {
	man, state, err := openSnapshot(ctx, "check snapshot", dir)
	if err != nil {
		return err
	}
	_ = state.Close()
	if want := d.identity(line{accel: man.Identity.Accel, shape: man.Identity.shape()}); !want.equal(man.Identity) {
		return dsec.Errorf(dsec.Unsupported, "check snapshot", dir, "it is of %s with another command line; this is %s", dsec.Quote(man.Identity.QEMU), dsec.Quote(d.version))
	}
	return nil
}

// Restore starts a machine from a snapshot, paused.
func (d *Driver) Restore(ctx context.Context, dir string, dev vmm.Devices) (vmm.VM, error) {
	const op = "restore"
	ctx, cancel := context.WithTimeout(ctx, migrateTime)
	defer cancel()
	man, state, err := openSnapshot(ctx, op, dir)
	if err != nil {
		return nil, err
	}
	defer func() { _ = state.Close() }()
	m, err := d.incoming(ctx, man, dev, &inherit{}, 0)
	if err != nil {
		return nil, err
	}
	if err := m.load(ctx, state); err != nil {
		return nil, m.abandon(op, err)
	}
	return m, nil
}

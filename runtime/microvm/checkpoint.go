package microvm

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/image"
	"github.com/opendsec/dsec/internal/diskpool"
	"github.com/opendsec/dsec/internal/fault"
	"github.com/opendsec/dsec/internal/lifecycle"
	"github.com/opendsec/dsec/internal/linux"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/runtime"
	"github.com/opendsec/dsec/runtime/microvm/vmm"
)

// moment is what is known of one that is kept.
type moment struct {
	read   []bool // of each layer: its data are a disk
	spec   dsec.Spec
	config image.Config
}

func momentOf(rec *record) moment {
	return moment{rec.Read, rec.Request.Spec, rec.Request.Layers.Config}
}

// carried is what a checkpoint says of the machine, docs/formats/checkpoint.md.
type carried struct {
	Read    []bool          `json:"read"`
	Monitor json.RawMessage `json:"monitor"` // the monitor's own
}

func decodeCarried(text []byte) (c carried, err error) {
	dec := json.NewDecoder(bytes.NewReader(text))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&c); err != nil {
		return c, dsec.E(dsec.Corrupt, "read", "machine of a checkpoint", err)
	}
	return c, nil
}

// carrier is the monitor, if what it keeps can go elsewhere.
func (r *Runtime) carrier(ctx context.Context, op, name string) (Machinery, vmm.Carrier, error) {
	m, err := r.open(ctx)
	if err != nil {
		return m, nil, err
	}
	c, ok := m.VMM.(vmm.Carrier)
	if !ok {
		return m, nil, dsec.Errorf(dsec.Unsupported, op, name, "snapshots of this monitor stay where they are")
	}
	return m, c, nil
}

// OpenMoment implements runtime.Checkpointer.
func (r *Runtime) OpenMoment(ctx context.Context, name string) (out runtime.Moment, err error) {
	const op = "open moment"
	if err := checkMoment(name); err != nil {
		return out, err
	}
	r.mu.Lock()
	m, ok := r.kept[name]
	r.mu.Unlock()
	if !ok {
		return out, dsec.Errorf(dsec.NotFound, op, name, "it was not kept, or is dropped")
	}
	_, c, err := r.carrier(ctx, op, name)
	if err != nil {
		return out, err
	}
	out.Spec, out.Config = m.spec, m.config
	defer func() {
		if err != nil {
			closeMoment(out.Files)
			err = dsec.E(dsec.ClassOf(err), op, name, err)
		}
	}()
	monitor, memory, err := c.OpenSnapshot(r.moment(name))
	if err != nil {
		return out, err
	}
	out.Files.Memory = memory
	if out.Machine, err = json.Marshal(carried{m.read, monitor}); err != nil {
		return out, err
	}
	dir, err := r.disks.Open(ctx, momentDisk(name))
	if err != nil {
		return out, err
	}
	defer func() { _ = dir.Close() }()
	if out.Files.Disk, err = os.Open(diskPath(dir)); err != nil {
		return out, dsec.E(fault.Class(err, dsec.Internal), op, name, err)
	}
	for f, size := range map[*os.File]*int64{out.Files.Disk: &out.Disk, out.Files.Memory: &out.Memory} {
		st, err := f.Stat()
		if err != nil {
			return out, dsec.E(dsec.Internal, op, name, err)
		}
		*size = st.Size()
	}
	return out, nil
}

func closeMoment(f layer.MomentFiles) {
	for _, f := range []*os.File{f.Disk, f.Memory} {
		if f != nil {
			_ = f.Close()
		}
	}
}

// BringMoment implements runtime.Checkpointer.
func (r *Runtime) BringMoment(ctx context.Context, name string, m runtime.Moment, layers []layer.Local, fill func(context.Context, layer.MomentFiles) error) error {
	const op = "bring moment"
	if err := checkMoment(name); err != nil {
		return err
	}
	r.mu.Lock()
	_, taken := r.kept[name]
	r.mu.Unlock()
	if taken {
		return dsec.Errorf(dsec.AlreadyExists, op, name, "there is one of that name")
	}
	err := r.bringMoment(ctx, name, m, layers, fill)
	if err == nil {
		return nil
	}
	late, cancel := context.WithTimeout(context.WithoutCancel(ctx), lifecycle.UndoLimit)
	defer cancel()
	return dsec.E(dsec.ClassOf(err), op, name, errors.Join(err, r.DropMoment(late, name)))
}

func (r *Runtime) bringMoment(ctx context.Context, name string, m runtime.Moment, layers []layer.Local, fill func(context.Context, layer.MomentFiles) error) error {
	const op = "bring moment"
	c, err := decodeCarried(m.Machine)
	if err != nil {
		return err
	}
	if len(c.Read) != len(layers) {
		return dsec.Errorf(dsec.Corrupt, op, name, "it says something of %d layers, and has %d", len(c.Read), len(layers))
	}
	if want := fileSystemSize(m.Spec.Limits.Disk); m.Disk != want {
		return dsec.Errorf(dsec.Corrupt, op, name, "a disk of %d bytes, of its limit it has %d", m.Disk, want)
	}
	machinery, monitor, err := r.carrier(ctx, op, name)
	if err != nil {
		return err
	}
	if err := r.completeMapped(ctx, layers, c.Read); err != nil {
		return err
	}
	// What would be made here for the same spec and layers: the snapshot has to be of one like it.
	like, err := r.back(ctx, machinery, runtime.Request{Spec: m.Spec, Layers: layer.Set{Layers: layers}}, c.Read)
	if err != nil {
		return err
	}
	defer like.letGo()
	if err := os.MkdirAll(r.moments(), 0o700); err != nil {
		return dsec.E(fault.Class(err, dsec.Internal), "make directory", r.moments(), err)
	}
	err = monitor.PlaceSnapshot(ctx, r.moment(name), c.Monitor, like.shape, func(memory *os.File) error {
		return r.fillMoment(ctx, name, m.Spec.Limits.Disk, memory, fill)
	})
	if err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.kept[name] = moment{c.Read, m.Spec, m.Config}
	return nil
}

// completeMapped brings the data of layers that a machine has mapped: there must be no hole in
// them any more.
func (r *Runtime) completeMapped(ctx context.Context, layers []layer.Local, read []bool) error {
	for i, l := range layers {
		whole, err := l.Whole()
		switch {
		case err != nil:
			return err
		case read[i] || whole:
		case r.cfg.Complete == nil:
			return dsec.Errorf(dsec.Unavailable, "complete layer", string(l.Digest), "its data are not all on this machine, and nobody brings them")
		default:
			if err := r.cfg.Complete(ctx, l); err != nil {
				return err
			}
		}
	}
	return nil
}

// fillMoment makes the disk of a moment, and has it and the memory written.
func (r *Runtime) fillMoment(ctx context.Context, name string, limit int64, memory *os.File, fill func(context.Context, layer.MomentFiles) error) error {
	dir, err := r.disks.Create(ctx, momentDisk(name), poolLimit(limit), diskpool.Owner{})
	if err != nil {
		return err
	}
	defer func() { _ = dir.Close() }()
	fd, err := unix.Openat(int(dir.Fd()), diskFile, unix.O_RDWR|unix.O_CREAT|unix.O_EXCL|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return dsec.E(fault.Class(err, dsec.Internal), "make disk", name, err)
	}
	disk := os.NewFile(uintptr(fd), diskFile)
	defer func() { _ = disk.Close() }()
	linux.WriteInPlace(disk)
	return fill(ctx, layer.MomentFiles{Disk: disk, Memory: memory})
}

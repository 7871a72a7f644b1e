package fullvm

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/diskimage"
	"github.com/opendsec/dsec/internal/fault"
	"github.com/opendsec/dsec/runtime/microvm/vmm"
)

// base is a disk image as it lies in its layer.
type base struct {
	manifest diskimage.Manifest
	disk     *os.File
}

// openBase opens the disk image that a sandbox, which uses its layers, was made of. A layer comes from anywhere: what
// stands for its files is looked at before it is opened.
func (r *Runtime) openBase(sb *sandbox, rec *record) (*base, error) {
	const op = "open disk image"
	layers := rec.Request.Layers.Layers
	ref := string(rec.Request.Spec.Image)
	if len(layers) != 1 {
		return nil, dsec.Errorf(dsec.Unsupported, op, ref, "the %s tier takes one layer, a disk image; these are %d", r.Tier(), len(layers))
	}
	mount, err := r.cfg.Mounts.Layer(string(sb.ID), layers[0].Digest)
	if err != nil {
		return nil, err
	}
	defer func() { _ = mount.Close() }()
	f, err := openRegular(mount, diskimage.ManifestFile)
	if err != nil {
		if errors.Is(err, os.ErrNotExist) {
			return nil, dsec.Errorf(dsec.Invalid, op, ref, "it is no disk image, which the %s tier needs: dsec image add-disk makes one", r.Tier())
		}
		return nil, imageError(op, ref, err)
	}
	text, err := io.ReadAll(io.LimitReader(f, diskimage.MaxManifest+1))
	_ = f.Close()
	if err != nil {
		return nil, imageError(op, ref, err)
	}
	m, err := diskimage.Parse(text)
	if err != nil {
		return nil, dsec.E(dsec.ClassOf(err), op, ref, err)
	}
	disk, err := openRegular(mount, diskimage.DiskFile)
	if err != nil {
		return nil, imageError(op, ref, err)
	}
	if st, err := disk.Stat(); err != nil || st.Size() != m.Size {
		_ = disk.Close()
		return nil, dsec.E(dsec.Invalid, op, ref, errors.Join(err, fmt.Errorf("its disk has not the %d bytes that it says", m.Size)))
	}
	return &base{m, disk}, nil
}

func imageError(op, ref string, err error) error {
	class := dsec.Invalid
	if errors.Is(err, unix.EIO) || errors.Is(err, unix.EUCLEAN) {
		class = dsec.Corrupt
	}
	return dsec.E(class, op, ref, err)
}

// openRegular opens a regular file of a mount for reading: a device or FIFO of that name is
// never opened.
func openRegular(mount *os.File, name string) (*os.File, error) {
	fd, err := unix.Openat2(int(mount.Fd()), name, &unix.OpenHow{Flags: unix.O_PATH | unix.O_NOFOLLOW | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_XDEV})
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: name, Err: err}
	}
	at := os.NewFile(uintptr(fd), name)
	defer func() { _ = at.Close() }()
	if st, err := at.Stat(); err != nil || !st.Mode().IsRegular() {
		return nil, errors.Join(err, fmt.Errorf("%s is no regular file", name))
	}
	return os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", at.Fd()), os.O_RDONLY|unix.O_CLOEXEC, 0)
}

// digested is a file of this machine, which is trusted, as it is now.
func digested(name string) (vmm.File, error) {
	f, err := os.Open(name)
	if err != nil {
		return vmm.File{}, dsec.E(dsec.Unsupported, "find firmware", name, errors.Unwrap(err))
	}
	defer func() { _ = f.Close() }()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return vmm.File{}, dsec.E(fault.Class(err, dsec.Internal), "read firmware", name, err)
	}
	return vmm.File{Path: name, SHA256: hex.EncodeToString(h.Sum(nil))}, nil
}

// shape is the machine that a sandbox is.
func (r *Runtime) shape(rec *record) (vmm.Shape, error) {
	l := rec.Request.Spec.Limits
	s := vmm.Shape{CPUs: max(1, int(l.CPU)), Memory: l.Memory &^ (1<<20 - 1), Disk: rec.Image.Size, Firmware: true, Balloon: true}
	if float64(s.CPUs) < l.CPU {
		s.CPUs++
	}
	if rec.Image.Video != diskimage.None {
		s.Video = rec.Image.Video
	}
	if rec.Image.Bus == diskimage.SATA {
		s.Bus = vmm.BusSATA
	}
	var err error
	s.Kernel, err = r.firmwareOf(rec.Image.Firmware == diskimage.UEFI)
	return s, err
}

// useLayers has them mounted until Unuse.
func (r *Runtime) useLayers(ctx context.Context, sb *sandbox, rec *record) error {
	return r.cfg.Mounts.Use(ctx, string(sb.ID), rec.Request.Layers.Layers)
}

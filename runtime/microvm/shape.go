package microvm

import (
	"context"
	"math"
	"os"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/fault"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/runtime"
	"github.com/opendsec/dsec/runtime/microvm/vmm"
	"github.com/opendsec/dsec/runtime/tier"
)

// A template is of one shape, so shapes are few: sizes are rounded up to these.
const (
	guestOwn   = 72 << 20  // what kernel and agent take of a machine's memory
	hostOwn    = 224 << 20 // what the monitor takes beside the machine's memory: translated code, its own
	pageShare  = 64        // the kernel keeps 64 bytes for each page of 4 KiB
	hostPids   = 64        // threads of a monitor
	smallSlot  = vmm.PmemAlign
	largeSlot  = 512 << 20 // from here on slots double
	smallDisk  = 64 << 30
	largeDisk  = 16 << 40
	leastSpool = 8 << 20
	mostLayers = 16 // that a machine has slots for, two each
)

// slotSize is the size of the slot that a file of n bytes is put in. Up to 512 MiB there is
// one in four, because what is too much costs nothing but 1/64 of it in a memory that all
// clones share.
func slotSize(n int64) int64 {
	size := int64(smallSlot)
	for size < n {
		if size < largeSlot {
			size *= 4
		} else {
			size *= 2
		}
	}
	return size
}

// spoolSize is how much output the agent keeps, in memory of its own.
func spoolSize(l dsec.Limits) int64 { return min(l.Output, max(l.Memory/4, leastSpool)) }

// memorySize is that of a machine whose sandbox has these limits: a power of two, or one and a half.
func memorySize(l dsec.Limits, slots []int64) int64 {
	need := l.Memory + l.Memory/pageShare + spoolSize(l) + guestOwn
	for _, n := range slots {
		need += n / pageShare
	}
	for size := int64(256 << 20); ; size *= 2 {
		if size >= need {
			return size
		}
		if size+size/2 >= need {
			return size + size/2
		}
	}
}

// diskSize is how large a machine that boots finds its disk, so that few templates do for all: copies of it have a file of
// the size of their file system, and what is asked for beyond is an error.
func diskSize(limit int64) int64 {
	for _, n := range []int64{smallDisk, 1 << 40, largeDisk} {
		if fileSystemSize(limit) <= n {
			return n
		}
	}
	return 0
}

// backing is what the layers of a sandbox are in its machine: files by slot, and by place of
// read-only disks.
type backing struct {
	shape  vmm.Shape
	slots  []string
	blocks []string
	read   []bool // of each layer: its data are a disk, because not all of them are here
	close  []*os.File
}

func (b *backing) letGo() {
	for _, f := range b.close {
		_ = f.Close()
	}
	b.close = nil
}

// back finds what the layers of a sandbox are. read says of which the data have to be a disk, as
// they were before; nil: it depends on what is here.
func (r *Runtime) back(ctx context.Context, m Machinery, req runtime.Request, read []bool) (_ *backing, err error) {
	layers := req.Layers.Layers
	spec := req.Spec
	b := &backing{shape: vmm.Shape{Kernel: m.Kernel, Initramfs: m.Initramfs, CPUs: 1, Disk: diskSize(spec.Limits.Disk), NIC: true,
		Balloon: spec.Boot == dsec.BootCold}}
	defer func() {
		if err != nil {
			b.letGo()
		}
	}()
	if err := checkShape(spec, len(layers)); err != nil {
		return nil, err
	}
	if read != nil && len(read) != len(layers) {
		return nil, dsec.Errorf(dsec.Conflict, "choose machine", "layers", "%d, and what it goes on from has %d", len(layers), len(read))
	}
	for i, l := range layers {
		if err := lengthen(l.Meta, l.MetaSize); err != nil {
			return nil, dsec.E(fault.Class(err, dsec.Internal), "map layer", string(l.Digest), err)
		}
		b.shape.Pmem, b.slots = append(b.shape.Pmem, slotSize(l.MetaSize)), append(b.slots, l.Meta)
		apart := false
		if read != nil {
			apart = read[i]
		} else if whole, err := l.Whole(); err != nil {
			return nil, err
		} else {
			apart = !whole
		}
		b.read = append(b.read, apart)
		if l.DataSize == 0 {
			continue
		}
		if apart {
			err = r.backByDisk(ctx, b, l)
		} else if err = lengthen(l.Data, l.DataSize); err == nil {
			b.shape.Pmem, b.slots = append(b.shape.Pmem, slotSize(l.DataSize)), append(b.slots, l.Data)
		}
		if err != nil {
			return nil, dsec.E(fault.Class(err, dsec.ClassOf(err)), "map layer", string(l.Digest), err)
		}
	}
	b.shape.Memory = memorySize(spec.Limits, b.shape.Pmem)
	if err := tier.MachineFits("choose machine", string(req.ID), b.shape.Memory); err != nil {
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.caps.Accel == "kvm" { // emulated processors take turns, and one has less to say to the others
		b.shape.CPUs = int(math.Ceil(spec.Limits.CPU))
	}
	return b, nil
}

// checkShape refuses what no machine can be made for.
func checkShape(spec dsec.Spec, layers int) error {
	if diskSize(spec.Limits.Disk) == 0 {
		return dsec.Errorf(dsec.Unsupported, "choose machine", "limits.disk", "%d bytes, at most %d on tier %s", spec.Limits.Disk, int64(largeDisk)/2, dsec.TierMicroVM)
	}
	if layers > mostLayers {
		return dsec.Errorf(dsec.Unsupported, "choose machine", "layers", "%d, at most %d on tier %s: merge some", layers, mostLayers, dsec.TierMicroVM)
	}
	return nil
}

// backByDisk has the data of a layer be a disk, of which nothing is mapped: whoever brings what is
// not here answers the monitor's reads.
func (r *Runtime) backByDisk(ctx context.Context, b *backing, l layer.Local) error {
	if r.cfg.Devices == nil {
		if whole, err := l.Whole(); err != nil {
			return err
		} else if whole { // it was not where a checkpoint of it was made
			b.shape.Blocks, b.blocks = append(b.shape.Blocks, slotSize(l.DataSize)), append(b.blocks, l.Data)
			return nil
		}
		return dsec.Errorf(dsec.Unavailable, "read layer", string(l.Digest), "its data are not all on this machine, and nobody brings them")
	}
	d, err := r.cfg.Devices.Device(ctx, l)
	if err != nil {
		return err
	}
	if d.Mount != nil {
		b.close = append(b.close, d.Mount)
	}
	b.shape.Blocks, b.blocks = append(b.shape.Blocks, slotSize(l.DataSize)), append(b.blocks, d.Path)
	return nil
}

// lengthen extends a file of a layer by a hole to the size of its slot, and lets everybody
// read it who can reach it: a monitor, which has a user of its own, opens its descriptor again.
func lengthen(path string, size int64) error {
	f, err := os.OpenFile(path, os.O_RDWR|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	st, err := f.Stat()
	if err != nil {
		return err
	}
	if want := slotSize(size); st.Size() < want {
		if err := f.Truncate(want); err != nil {
			return err
		}
	}
	if st.Mode().Perm()&0o444 != 0o444 {
		return f.Chmod(st.Mode().Perm() | 0o444)
	}
	return nil
}

package microvm

import (
	"math"
	"os"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/fault"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/runtime/microvm/vmm"
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

// diskSize is the size of the file behind a machine's disk, of which the file system
// takes as much as the sandbox may.
func diskSize(limit int64) int64 {
	for _, n := range []int64{smallDisk, 1 << 40, largeDisk} {
		if fileSystemSize(limit) <= n {
			return n
		}
	}
	return 0
}

// shapeOf is the machine of a sandbox.
func (r *Runtime) shapeOf(m Machinery, spec dsec.Spec, layers []layer.Local) (vmm.Shape, error) {
	s := vmm.Shape{Kernel: m.Kernel, Initramfs: m.Initramfs, CPUs: 1, Disk: diskSize(spec.Limits.Disk), NIC: true}
	if s.Disk == 0 {
		return s, dsec.Errorf(dsec.Unsupported, "choose machine", "limits.disk", "%d bytes, at most %d on tier %s", spec.Limits.Disk, int64(largeDisk)/2, dsec.TierMicroVM)
	}
	if len(layers) > mostLayers {
		return s, dsec.Errorf(dsec.Unsupported, "choose machine", "layers", "%d, at most %d on tier %s: merge some", len(layers), mostLayers, dsec.TierMicroVM)
	}
	for _, l := range layers {
		s.Pmem = append(s.Pmem, slotSize(l.MetaSize))
		if l.DataSize > 0 {
			s.Pmem = append(s.Pmem, slotSize(l.DataSize))
		}
	}
	s.Memory = memorySize(spec.Limits, s.Pmem)
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.caps.Accel == "kvm" { // emulated processors take turns, and one has less to say to the others
		s.CPUs = int(math.Ceil(spec.Limits.CPU))
	}
	return s, nil
}

// slotFiles are the files of layers, as long as their slots, in their order.
func slotFiles(layers []layer.Local) ([]string, error) {
	var files []string
	for _, l := range layers {
		for _, f := range []struct {
			path string
			size int64
		}{{l.Meta, l.MetaSize}, {l.Data, l.DataSize}} {
			if f.size == 0 {
				continue
			}
			if err := lengthen(f.path, f.size); err != nil {
				return nil, dsec.E(fault.Class(err, dsec.Internal), "map layer", string(l.Digest), err)
			}
			files = append(files, f.path)
		}
	}
	return files, nil
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

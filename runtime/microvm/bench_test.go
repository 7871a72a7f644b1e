package microvm

import (
	"context"
	"crypto/rand"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/layer"
	"github.com/opendsec/dsec/runtime"
	"github.com/opendsec/dsec/runtime/microvm/qemu"
	"github.com/opendsec/dsec/runtime/microvm/vmm"
	"github.com/opendsec/dsec/runtime/runtimetest/layertest"
)

// The numbers of bench/RESULTS.md: DSEC_BENCH=1 go test -run TestNumbers -v ./runtime/microvm
func benching(t *testing.T) *world {
	if os.Getenv("DSEC_BENCH") == "" {
		t.Skip("numbers are measured with DSEC_BENCH=1")
	}
	return newWorld(t)
}

func median(d []time.Duration) time.Duration {
	slices.Sort(d)
	return d[len(d)/2]
}

// measure is the median of several runs.
func measure(t *testing.T, n int, run func() time.Duration) time.Duration {
	t.Helper()
	var all []time.Duration
	for range n {
		all = append(all, run())
	}
	return median(all)
}

// From the start of a monitor to the first answer of the agent.
func TestNumbersOfStarts(t *testing.T) {
	w := benching(t)
	m, err := w.r.open(t.Context())
	must(t, err)
	shape := vmm.Shape{Kernel: m.Kernel, Initramfs: m.Initramfs, CPUs: 1, Memory: 256 << 20, Pmem: []int64{2 << 20, 2 << 20}, NIC: true}
	dev := vmm.Devices{}
	tp, err := m.VMM.BuildTemplate(t.Context(), shape, ready)
	must(t, err)
	answers := func(vm vmm.VM, err error) {
		must(t, err)
		must(t, ready(t.Context(), vm.Channel()))
		vm.Kill()
	}
	cold := measure(t, 5, func() time.Duration {
		begun := time.Now()
		vm, err := m.VMM.Start(t.Context(), shape, dev)
		answers(vm, err)
		return time.Since(begun)
	})
	clone := measure(t, 21, func() time.Duration {
		begun := time.Now()
		vm, err := m.VMM.Clone(t.Context(), tp, dev)
		must(t, err)
		must(t, ready(t.Context(), vm.Channel()))
		took := time.Since(begun)
		vm.Kill()
		return took
	})
	pool := measure(t, 21, func() time.Duration {
		p, err := m.VMM.Prepare(t.Context(), tp, dev)
		must(t, err)
		begun := time.Now()
		vm, err := p.Begin(t.Context())
		must(t, err)
		must(t, ready(t.Context(), vm.Channel()))
		took := time.Since(begun)
		vm.Kill()
		return took
	})
	create := measure(t, 11, func() time.Duration {
		begun := time.Now()
		id := w.create(t)
		took := time.Since(begun)
		must(t, w.r.Destroy(t.Context(), id))
		return took
	})
	t.Logf("cold boot to the agent's answer %v; clone %v (1/%.1f); prepared %v (1/%.1f); a whole sandbox %v", cold, clone, float64(cold)/float64(clone),
		pool, float64(cold)/float64(pool), create)
}

// coldVMM boots each machine.
type coldVMM struct {
	*qemu.Driver
	mu     sync.Mutex
	shapes map[string]vmm.Shape
}

func (c *coldVMM) BuildTemplate(_ context.Context, s vmm.Shape, _ vmm.Ready) (vmm.Template, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	key := fmt.Sprint(len(c.shapes))
	c.shapes[key] = s
	return vmm.Template{Key: key}, nil
}

func (c *coldVMM) Clone(ctx context.Context, t vmm.Template, d vmm.Devices) (vmm.VM, error) {
	c.mu.Lock()
	s := c.shapes[t.Key]
	c.mu.Unlock()
	return c.Start(ctx, s, d)
}

const (
	machines   = 10
	imageFiles = 5000
	imageFile  = 64 << 10
)

// imageOf is a layer of 312 MiB in 5,000 files.
func imageOf(t *testing.T) layer.Local {
	t.Helper()
	l, err := layertest.Build(t.TempDir(), func(dir string) error {
		for i := range imageFiles {
			sub := filepath.Join(dir, "tree", fmt.Sprint(i%50))
			b := make([]byte, imageFile)
			_, _ = rand.Read(b)
			if err := os.MkdirAll(sub, 0o755); err != nil {
				return err
			}
			if err := os.WriteFile(filepath.Join(sub, fmt.Sprint(i)), b, 0o644); err != nil {
				return err
			}
		}
		return nil
	})
	must(t, err)
	return l
}

// Memory of ten machines that have read the same image: what their monitors have of this machine's,
// shared pages by their part, and what of the image is in the page cache and in none of them.
func TestNumbersOfMemory(t *testing.T) {
	w := benching(t)
	l := imageOf(t)
	with := func(r *runtime.Request) {
		r.Layers.Layers = append(r.Layers.Layers, l)
		r.Spec.Limits.Memory = 512 << 20
	}
	run := func(name string, cold, disk bool) int64 {
		w.machinery, w.devices = nil, nil
		if cold {
			w.machinery = func(m *Machinery) { m.VMM = &coldVMM{Driver: w.driver, shapes: map[string]vmm.Shape{}} }
		}
		present := filepath.Join(filepath.Dir(l.Data), layer.PresentFile)
		if disk {
			w.devices = elsewhere{l.Data}
			must(t, os.WriteFile(present, nil, 0o600))
			defer func() { must(t, os.Remove(present)) }()
		}
		w.reopen(t)
		if !cold { // the template is not a machine's
			must(t, w.r.Destroy(t.Context(), w.create(t, with)))
		}
		var ids []dsec.SandboxID
		for range machines {
			ids = append(ids, w.create(t, with))
		}
		idle := w.memory(t, ids)
		for _, id := range ids {
			if o := w.run(t, id, "find /tree -type f -exec cat {} + | wc -c"); o.Stdout != fmt.Sprintln(imageFiles*imageFile) {
				t.Fatalf("%+v", o)
			}
		}
		read := w.memory(t, ids)
		extra := int64(0)
		if disk {
			extra = resident(t, l.Data)
		}
		for _, id := range ids {
			must(t, w.r.Destroy(t.Context(), id))
		}
		t.Logf("%-28s idle %5.1f MiB each; after reading %d MiB: %6.0f MiB together, and %4.0f MiB of page cache", name, float64(idle)/machines/(1<<20),
			imageFiles*imageFile>>20, float64(read)/(1<<20), float64(extra)/(1<<20))
		return read + extra
	}
	base := run("cold, virtio-blk", true, true)
	coldMapped := run("cold, mapped", true, false)
	cloneDisk := run("clones, virtio-blk", false, true)
	clones := run("clones, mapped", false, false)
	for name, n := range map[string]int64{"cold, mapped": coldMapped, "clones, virtio-blk": cloneDisk, "clones, mapped": clones} {
		t.Logf("%s: %.1f %% below cold machines with virtio-blk", name, 100*(1-float64(n)/float64(base)))
	}
}

func (w *world) memory(t *testing.T, ids []dsec.SandboxID) (sum int64) {
	t.Helper()
	for _, id := range ids {
		s, err := w.r.Stats(t.Context(), id)
		must(t, err)
		sum += s.HostMemory
	}
	return sum
}

// resident is how much of a file is in the page cache.
func resident(t *testing.T, path string) int64 {
	t.Helper()
	f, err := os.Open(path)
	must(t, err)
	defer func() { _ = f.Close() }()
	st, err := f.Stat()
	must(t, err)
	m, err := unix.Mmap(int(f.Fd()), 0, int(st.Size()), unix.PROT_READ, unix.MAP_SHARED)
	must(t, err)
	defer func() { _ = unix.Munmap(m) }()
	page := os.Getpagesize()
	vec := make([]byte, (len(m)+page-1)/page)
	if _, _, errno := unix.Syscall(unix.SYS_MINCORE, uintptr(unsafe.Pointer(&m[0])), uintptr(len(m)), uintptr(unsafe.Pointer(&vec[0]))); errno != 0 {
		t.Fatal(errno)
	}
	n := int64(0)
	for _, v := range vec {
		n += int64(v & 1)
	}
	return n * int64(page)
}

// Pausing, going on, keeping a moment and copying, by how much memory the sandbox has written.
func TestNumbersOfMoments(t *testing.T) {
	w := benching(t)
	for _, dirty := range []int{0, 100, 500} {
		grow := func(r *runtime.Request) { r.Spec.Limits.Memory, r.Spec.Limits.Disk = 1<<30, 1<<30 }
		id := w.create(t, grow)
		if dirty > 0 {
			if o := w.run(t, id, fmt.Sprintf("yes 0123456789abcdef | head -c %d >/big; cat /big >/dev/null; echo $?", dirty*1000*1000)); o.Stdout != "0\n" {
				t.Fatalf("%+v", o)
			}
		}
		s, err := w.r.Stats(t.Context(), id)
		must(t, err)
		pause := measure(t, 5, func() time.Duration {
			begun := time.Now()
			must(t, w.r.Pause(t.Context(), id))
			took := time.Since(begun)
			must(t, w.r.Resume(t.Context(), id))
			return took
		})
		resume := measure(t, 5, func() time.Duration {
			must(t, w.r.Pause(t.Context(), id))
			begun := time.Now()
			must(t, w.r.Resume(t.Context(), id))
			return time.Since(begun)
		})
		n := 0
		keep := measure(t, 3, func() time.Duration {
			n++
			begun := time.Now()
			must(t, w.r.KeepMoment(t.Context(), id, fmt.Sprintf("m%dx%d", dirty, n)))
			return time.Since(begun)
		})
		fork := measure(t, 3, func() time.Duration {
			r := request(grow)
			r.From = fmt.Sprintf("m%dx1", dirty)
			begun := time.Now()
			_, err := w.r.Create(t.Context(), r)
			must(t, err)
			took := time.Since(begun)
			must(t, w.r.Destroy(t.Context(), r.ID))
			return took
		})
		for i := range n {
			must(t, w.r.DropMoment(t.Context(), fmt.Sprintf("m%dx%d", dirty, i+1)))
		}
		t.Logf("%3d MB written, %4.0f MiB of host memory: pause %v, resume %v, keep a moment %v, copy from it %v", dirty, float64(s.HostMemory)/(1<<20), pause, resume, keep, fork)
		must(t, w.r.Destroy(t.Context(), id))
	}
}

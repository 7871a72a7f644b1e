package cgroup

import (
	"errors"
	"fmt"
	"math"
	"strconv"

	"golang.org/x/sys/unix"
)

// period of the CPU quota, in microseconds: the kernel's default.
const period = 100_000

func (l Limits) check() error {
	switch {
	case l.CPU < 0 || math.IsNaN(l.CPU) || l.CPU > 1<<16:
		return fmt.Errorf("cpu %g", l.CPU)
	case l.Weight < 0 || l.Weight > 10_000:
		return fmt.Errorf("weight %d, want 1 to 10000", l.Weight)
	case l.Visible < 0 || l.Memory < 0 || l.Pids < 0:
		return fmt.Errorf("a negative limit: %+v", l)
	}
	return nil
}

// quota is in microseconds of each period; -1 is none.
func (l Limits) quota() int64 {
	if l.CPU == 0 {
		return -1
	}
	return max(int64(math.Round(l.CPU*period)), 1000) // the kernel refuses less than 1 ms
}

func orNone(n int64, none string) string {
	if n <= 0 {
		return none
	}
	return strconv.FormatInt(n, 10)
}

// limitV2 sets everything.
func (r *Root) limitV2(name string, s settings) error {
	l, cpus := s.Limits, s.CPUs
	if cpus == nil { // 6.1 refuses "none" while a process is inside
		cpus = r.cpus.all
	}
	for _, f := range []struct{ file, value string }{
		{"memory.max", orNone(l.Memory, "max")},
		{"memory.swap.max", "0"},
		{"pids.max", orNone(l.Pids, "max")},
		{"cpu.max", orNone(l.quota(), "max") + " " + strconv.Itoa(period)},
		{"cpu.weight", strconv.Itoa(orNormal(l.Weight))},
		{"cpuset.cpus", formatCPUs(cpus)},
	} {
		if f.value == "" || (f.file == "memory.swap.max" && l.Memory == 0) {
			continue
		}
		err := r.unified.write(name+"/"+f.file, f.value)
		optional := f.file == "memory.swap.max" || (f.file == "cpuset.cpus" && s.CPUs == nil)
		if err != nil && !(optional && errors.Is(err, unix.ENOENT)) {
			return err
		}
	}
	return nil
}

func orNormal(weight int) int {
	if weight == 0 {
		return 100
	}
	return weight
}

// limitV1 sets what differs from was.
func (r *Root) limitV1(name string, l, was Limits) error {
	if l.Memory != was.Memory {
		if err := r.limitMemoryV1(name, l.Memory); err != nil {
			return err
		}
	}
	if l.Pids != was.Pids {
		if err := r.v1["pids"].write(name+"/pids.max", orNone(l.Pids, "max")); err != nil {
			return err
		}
	}
	if l.CPU != was.CPU {
		q := strconv.FormatInt(l.quota(), 10)
		if err := r.v1["cpu"].write(name+"/cpu.cfs_quota_us", q); err != nil {
			return err
		}
	}
	if orNormal(l.Weight) != orNormal(was.Weight) {
		shares := min(max(1024*orNormal(l.Weight)/100, 2), 262144)
		return r.v1["cpu"].write(name+"/cpu.shares", strconv.Itoa(shares))
	}
	return nil
}

// limitMemoryV1 sets the limit of memory and the equal one of memory and swap
// together. The kernel demands memory ≤ memory+swap at every moment, so one
// order works for growing and the other for shrinking.
func (r *Root) limitMemoryV1(name string, n int64) error {
	if err := r.limitSocketsV1(name, n); err != nil {
		return err
	}
	d, value := r.v1["memory"], orNone(n, "-1")
	const limit, withSwap = "/memory.limit_in_bytes", "/memory.memsw.limit_in_bytes"
	err := d.write(name+limit, value)
	if errors.Is(err, unix.EINVAL) {
		if err := d.write(name+withSwap, value); err != nil {
			return err
		}
		return d.write(name+limit, value)
	}
	if err != nil {
		return err
	}
	err = d.write(name+withSwap, value)
	if errors.Is(err, unix.ENOENT) { // swap is not accounted: at least do not prefer it
		return d.write(name+"/memory.swappiness", "0")
	}
	return err
}

// socketsLeast is what buffers of sockets may hold in any case.
const socketsLeast = 16 << 20

// limitSocketsV1 bounds what TCP and UDP buffers hold, which v1 counts beside
// the rest and only where a limit is set: a quarter of the memory limit. V2 counts
// them with the rest.
func (r *Root) limitSocketsV1(name string, n int64) error {
	if n > 0 {
		n = max(n/4, socketsLeast)
	}
	err := r.v1["memory"].write(name+"/memory.kmem.tcp.limit_in_bytes", orNone(n, "-1"))
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EOPNOTSUPP) {
		return nil // a kernel without that counter
	}
	return err
}

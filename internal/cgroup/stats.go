package cgroup

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// Stats samples the group.
func (g *Group) Stats() (Stats, error) {
	var s Stats
	var err error
	if g.root.layout.version == V2 {
		err = g.statsV2(&s)
	} else {
		err = g.statsV1(&s)
	}
	if s.MemoryLimit >= math.MaxInt64>>12<<12 {
		s.MemoryLimit = 0 // how v1 says "none"
	}
	return s, g.wrap("sample control group", err)
}

// reading is one number of a sample; an optional one is 0 where the kernel
// does not have it.
type reading struct {
	d        dir
	file     string
	key      string // "" if the file is one number
	into     *int64
	optional bool
}

func read(all []reading) error {
	for _, r := range all {
		var err error
		if r.key == "" {
			*r.into, err = r.d.number(r.file)
		} else {
			var m map[string]int64
			m, err = r.d.keyed(r.file)
			*r.into = m[r.key]
		}
		if err != nil && !(r.optional && errors.Is(err, unix.ENOENT)) {
			return err
		}
	}
	return nil
}

func (g *Group) statsV2(s *Stats) error {
	d, at := g.root.unified, g.path+"/"
	var cpu, throttled int64
	err := read([]reading{
		{d: d, file: at + "cpu.stat", key: "usage_usec", into: &cpu},
		{d: d, file: at + "cpu.stat", key: "throttled_usec", into: &throttled},
		{d: d, file: at + "memory.current", into: &s.Memory},
		{d: d, file: at + "memory.peak", into: &s.MemoryPeak, optional: true},
		{d: d, file: at + "memory.max", into: &s.MemoryLimit},
		{d: d, file: at + "memory.events", key: "oom_kill", into: &s.OOMKills},
		{d: d, file: at + "pids.current", into: &s.Pids},
		{d: d, file: at + "pids.peak", into: &s.PidsPeak, optional: true},
		{d: d, file: at + "pids.max", into: &s.PidsLimit},
		{d: d, file: at + "pids.events", key: "max", into: &s.PidsDenied},
	})
	s.CPU, s.Throttled = time.Duration(cpu)*time.Microsecond, time.Duration(throttled)*time.Microsecond
	return err
}

func (g *Group) statsV1(s *Stats) error {
	mem, pids, at := g.root.v1["memory"], g.root.v1["pids"], g.name+"/"
	var cpu, throttled int64
	err := read([]reading{
		{d: g.root.unified, file: at + "cpu.stat", key: "usage_usec", into: &cpu},
		{d: g.root.v1["cpu"], file: at + "cpu.stat", key: "throttled_time", into: &throttled},
		{d: mem, file: at + "memory.usage_in_bytes", into: &s.Memory},
		{d: mem, file: at + "memory.max_usage_in_bytes", into: &s.MemoryPeak},
		{d: mem, file: at + "memory.limit_in_bytes", into: &s.MemoryLimit},
		{d: mem, file: at + "memory.oom_control", key: "oom_kill", into: &s.OOMKills},
		{d: pids, file: at + "pids.current", into: &s.Pids},
		{d: pids, file: at + "pids.peak", into: &s.PidsPeak, optional: true},
		{d: pids, file: at + "pids.max", into: &s.PidsLimit},
		{d: pids, file: at + "pids.events", key: "max", into: &s.PidsDenied, optional: true},
	})
	s.CPU, s.Throttled = time.Duration(cpu)*time.Microsecond, time.Duration(throttled)
	return err
}

// oomFile is the file that counts out-of-memory kills.
func (g *Group) oomFile() (dir, string) {
	if g.root.layout.version == V2 {
		return g.root.unified, g.path + "/memory.events"
	}
	return g.root.v1["memory"], g.name + "/memory.oom_control"
}

func (g *Group) oomKills() (n int64, err error) {
	d, file := g.oomFile()
	return n, read([]reading{{d: d, file: file, key: "oom_kill", into: &n}})
}

// OOMKills counts the processes killed by the memory limit. Cheap.
func (g *Group) OOMKills() (int64, error) {
	n, err := g.oomKills()
	return n, g.wrap("sample control group", err)
}

// WaitOOM returns when the count is larger than seen, with the count. It holds
// at most one descriptor while it waits.
func (g *Group) WaitOOM(ctx context.Context, seen int64) (int64, error) {
	const op = "wait for out-of-memory of"
	var n int64
	check := func() (more bool, err error) {
		n, err = g.oomKills()
		return n > seen, err
	}
	var err error
	if g.root.layout.version == V2 {
		d, file := g.oomFile()
		err = g.root.watch.until(ctx, d.path+"/"+file, check)
	} else {
		err = g.waitOOMv1(ctx, check)
	}
	return n, g.wrap(op, err)
}

// waitOOMv1 is told by an eventfd. It fires when the group is out of memory,
// some time before the kernel has killed and counted (no file says how long),
// and when the group is removed.
func (g *Group) waitOOMv1(ctx context.Context, check func() (bool, error)) error {
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return os.NewSyscallError("eventfd", err)
	}
	f := os.NewFile(uintptr(fd), "eventfd")
	defer func() { _ = f.Close() }()
	d, file := g.oomFile()
	control, err := d.open(file, unix.O_RDONLY)
	if err != nil {
		return err
	}
	err = d.write(g.name+"/cgroup.event_control", fmt.Sprintf("%d %d", fd, control.Fd()))
	_ = control.Close() // the kernel has its own reference
	if err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { _ = f.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	if ok, err := check(); ok || err != nil {
		return err
	}
	for {
		if _, err := f.Read(make([]byte, 8)); ctx.Err() != nil {
			return context.Cause(ctx)
		} else if err != nil {
			return os.NewSyscallError("read eventfd", err)
		}
		if ok, err := soon(ctx, killTime, check); ok || err != nil {
			return err
		}
	}
}

// killTime is how long after the event a kill may take to be counted.
const killTime = 2 * time.Second

// soon repeats check with growing pauses for as long as d.
func soon(ctx context.Context, d time.Duration, check func() (bool, error)) (bool, error) {
	end := time.Now().Add(d)
	for wait := time.Millisecond; ; wait = min(2*wait, 20*time.Millisecond) {
		if ok, err := check(); ok || err != nil || time.Now().After(end) {
			return ok, err
		}
		t := time.NewTimer(wait)
		select {
		case <-ctx.Done():
			t.Stop()
			return false, context.Cause(ctx)
		case <-t.C:
		}
	}
}

package cgroup

import (
	"errors"
	"math"
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

// OOMKills counts the processes killed by the memory limit. Cheap.
func (g *Group) OOMKills() (n int64, err error) {
	d, file := g.root.v1["memory"], g.name+"/memory.oom_control"
	if g.root.layout.version == V2 {
		d, file = g.root.unified, g.path+"/memory.events"
	}
	err = read([]reading{{d: d, file: file, key: "oom_kill", into: &n}})
	return n, g.wrap("sample control group", err)
}

// Tasks counts the processes and threads in the group and below. Cheap.
func (g *Group) Tasks() (n int64, err error) {
	d, file := g.root.v1["pids"], g.name+"/pids.current"
	if g.root.layout.version == V2 {
		d, file = g.root.unified, g.path+"/pids.current"
	}
	err = read([]reading{{d: d, file: file, into: &n}})
	return n, g.wrap("sample control group", err)
}

// NewPeak lets the peak of memory begin again at what is used now, and reports whether
// the kernel can.
func (g *Group) NewPeak() bool {
	return g.root.layout.version != V2 && g.root.v1["memory"].write(g.name+"/memory.max_usage_in_bytes", "0") == nil
}

// Peak is the most memory since NewPeak. Cheap.
func (g *Group) Peak() (n int64, err error) {
	d, file := g.root.v1["memory"], g.name+"/memory.max_usage_in_bytes"
	if g.root.layout.version == V2 {
		d, file = g.root.unified, g.path+"/memory.peak"
	}
	err = read([]reading{{d: d, file: file, into: &n}})
	return n, g.wrap("sample control group", err)
}

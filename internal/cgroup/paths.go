package cgroup

import (
	"os"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
)

// Paths say where a group is, for a process that puts others into it or reads
// its accounts by itself. Empty ones do not exist on this layout.
type Paths struct {
	Unified  string   // v2 directory
	Tasks    []string // v1 files a process writes "0" into to join
	OOM      string   // file with a line "oom_kill N"
	Limit    string   // of memory
	Peak     string   // of memory
	Throttle string   // file with "throttled_time" or "throttled_usec"
}

// Paths returns them without looking; the group need not exist any more.
func (g *Group) Paths() Paths {
	r := g.root
	p := Paths{Unified: r.unified.path + "/" + g.path}
	if r.layout.version == V2 {
		p.OOM, p.Limit, p.Peak, p.Throttle = p.Unified+"/memory.events", p.Unified+"/memory.max", p.Unified+"/memory.peak", p.Unified+"/cpu.stat"
		return p
	}
	for _, t := range g.v1Groups() {
		p.Tasks = append(p.Tasks, r.v1[t.controller].path+"/"+t.group+"/tasks")
	}
	mem := r.v1["memory"].path + "/" + g.name
	p.OOM, p.Limit, p.Peak = mem+"/memory.oom_control", mem+"/memory.limit_in_bytes", mem+"/memory.max_usage_in_bytes"
	p.Throttle = r.v1["cpu"].path + "/" + g.name + "/cpu.stat"
	return p
}

// Number is that of the group on the v2 tree, by which the kernel knows it.
func (g *Group) Number() (uint64, error) {
	var st unix.Stat_t
	if err := unix.Stat(g.Paths().Unified, &st); err != nil {
		return 0, dsec.E(classOf(err), "find number of control group", g.name, err)
	}
	return st.Ino, nil
}

// Directory opens the one on the v2 tree that all groups are in.
func (r *Root) Directory() (*os.File, error) {
	f, err := os.Open(r.unified.path)
	if err != nil {
		return nil, dsec.E(classOf(err), "open control groups", r.name, err)
	}
	return f, nil
}

// placing is a v1 group that a process of a sandbox is in.
type placing struct{ controller, group string }

func (g *Group) v1Groups() []placing {
	s := g.current()
	return []placing{{"memory", g.name}, {"cpu", g.name}, {"pids", g.name},
		{"cpuset", cpusGroup(s.CPUs)}, {"devices", devicesGroup(s.Limits.Devices)}}
}

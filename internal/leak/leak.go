// Package leak lists what a sandbox system can leave on a machine (processes,
// mounts, network links and namespaces, control groups, loop devices), so that a
// test or `dsec down` can compare before and after.
package leak

import (
	"bufio"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sort"
	"strings"
)

// Snapshot is everything of the kinds above, each line naming one thing.
type Snapshot map[string]struct{}

// Take reads the machine. match selects processes and control groups: those
// whose command name or group path contains it. An unreadable corner of the
// machine is left out: it cannot be ours, we are root.
func Take(match string) Snapshot {
	s := Snapshot{}
	s.processes(match)
	s.mounts()
	s.names("/sys/class/net", "link")
	s.names("/run/netns", "named network namespace")
	s.groups(match)
	s.loops()
	return s
}

// Since lists what is in s and was not in before, sorted.
func (s Snapshot) Since(before Snapshot) []string {
	var out []string
	for line := range s {
		if _, ok := before[line]; !ok {
			out = append(out, line)
		}
	}
	sort.Strings(out)
	return out
}

func (s Snapshot) add(kind, what string) { s[kind+": "+what] = struct{}{} }

func (s Snapshot) processes(match string) {
	dirs, _ := filepath.Glob("/proc/[0-9]*")
	self := fmt.Sprint("/proc/", os.Getpid())
	for _, d := range dirs {
		if d == self {
			continue
		}
		comm, err := os.ReadFile(d + "/comm")
		if err != nil || ended(d) {
			continue
		}
		group, _ := os.ReadFile(d + "/cgroup")
		name := strings.TrimSpace(string(comm))
		if strings.Contains(name, match) || strings.Contains(string(group), "/"+match) {
			s.add("process", name+" "+filepath.Base(d))
		}
		if ns, err := os.Readlink(d + "/ns/net"); err == nil {
			s.add("network namespace", ns)
		}
	}
}

// ended says that a process is only an entry that its parent has not read yet.
func ended(dir string) bool {
	stat, err := os.ReadFile(dir + "/stat")
	_, rest, ok := strings.Cut(string(stat), ") ")
	return err != nil || !ok || strings.HasPrefix(rest, "Z") || strings.HasPrefix(rest, "X")
}

func (s Snapshot) mounts() {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return
	}
	defer f.Close()
	for sc := bufio.NewScanner(f); sc.Scan(); {
		fields := strings.Fields(sc.Text())
		if len(fields) > 6 {
			i := slices.Index(fields, "-")
			s.add("mount", fields[4]+" "+strings.Join(fields[i+1:min(i+3, len(fields))], " "))
		}
	}
}

func (s Snapshot) names(dir, kind string) {
	entries, _ := os.ReadDir(dir)
	for _, e := range entries {
		s.add(kind, e.Name())
	}
}

func (s Snapshot) groups(match string) {
	_ = filepath.WalkDir("/sys/fs/cgroup", func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() && strings.Contains(path, "/"+match) {
			s.add("control group", path)
		}
		return nil
	})
}

func (s Snapshot) loops() {
	files, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, f := range files {
		if text, err := os.ReadFile(f); err == nil {
			s.add("loop device", strings.TrimSpace(string(text)))
		}
	}
}

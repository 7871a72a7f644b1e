package cgroup

import (
	"bufio"
	"errors"
	"io"
	"os"
	"path"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// controllers are those used; on a hybrid machine each is in a hierarchy of
// its own or mounted together with others. CPU time and freezing come from
// the v2 tree, so cpuacct and freezer are not needed.
var controllers = []string{"memory", "cpu", "cpuset", "pids", "devices"}

// hierarchy is a mounted tree and the place of this process in it.
type hierarchy struct {
	mount string // where it is mounted
	own   string // path of this process's group below the mount
}

// layout is what a machine has.
type layout struct {
	version Version
	unified hierarchy
	v1      map[string]hierarchy // by controller; empty on v2
}

// findLayout reads the layout from the two files that describe it.
func findLayout(mountinfo, self io.Reader) (layout, error) {
	own, err := ownPaths(self)
	if err != nil {
		return layout{}, err
	}
	l := layout{v1: map[string]hierarchy{}}
	lines := bufio.NewScanner(mountinfo)
	for lines.Scan() {
		m, ok := parseMount(lines.Text())
		if !ok {
			continue
		}
		if m.fstype == "cgroup2" {
			if l.unified.mount == "" {
				l.unified = hierarchy{m.point, below(m.root, own[""])}
			}
			continue
		}
		for _, c := range controllers {
			if slices.Contains(m.options, c) && l.v1[c].mount == "" {
				l.v1[c] = hierarchy{m.point, below(m.root, own[c])}
			}
		}
	}
	if err := lines.Err(); err != nil {
		return l, err
	}
	if l.unified.mount == "" {
		return l, errors.New("no cgroup v2 tree is mounted: mount -t cgroup2 none /sys/fs/cgroup/unified")
	}
	l.version = V2
	if len(l.v1) > 0 {
		l.version = Hybrid
		for _, c := range controllers {
			if l.v1[c].mount == "" {
				return l, errors.New("cgroup v1 is in use, but its controller " + c + " is not mounted")
			}
		}
	}
	return l, nil
}

// ownPaths reads /proc/self/cgroup: controller → path; "" is the v2 tree.
func ownPaths(r io.Reader) (map[string]string, error) {
	own := map[string]string{}
	lines := bufio.NewScanner(r)
	for lines.Scan() {
		f := strings.SplitN(lines.Text(), ":", 3)
		if len(f) != 3 {
			continue
		}
		for c := range strings.SplitSeq(f[1], ",") {
			own[c] = f[2]
		}
	}
	return own, lines.Err()
}

type mountLine struct {
	root, point, fstype string
	options             []string
}

func parseMount(line string) (mountLine, bool) {
	left, right, ok := strings.Cut(line, " - ")
	l, r := strings.Fields(left), strings.Fields(right)
	if !ok || len(l) < 5 || len(r) < 3 || (r[0] != "cgroup" && r[0] != "cgroup2") {
		return mountLine{}, false
	}
	return mountLine{root: l[3], point: l[4], fstype: r[0], options: strings.Split(r[2], ",")}, true
}

// below translates a path of the hierarchy to one below a mount that shows
// only a part of it.
func below(root, own string) string {
	if own == "" || strings.HasPrefix(own, "/..") {
		return "/"
	}
	if rest, ok := strings.CutPrefix(own, strings.TrimSuffix(root, "/")); ok {
		return path.Join("/", rest)
	}
	return own
}

func machineLayout() (layout, error) {
	mounts, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return layout{}, err
	}
	defer func() { _ = mounts.Close() }()
	self, err := os.Open("/proc/self/cgroup")
	if err != nil {
		return layout{}, err
	}
	defer func() { _ = self.Close() }()
	return findLayout(mounts, self)
}

// unifiedBase is the directory of the v2 tree below which a Root goes: the
// top, as other programs that do not ask systemd do it; but where this process
// was given a part of the tree (systemd's Delegate=, a container), that part.
func (l layout) unifiedBase() (base string, delegated bool) {
	own := path.Join(l.unified.mount, l.unified.own)
	for _, x := range []string{"trusted.delegate", "user.delegate"} {
		if n, err := unix.Getxattr(own, x, make([]byte, 8)); err == nil && n == 1 {
			return own, true
		}
	}
	if _, err := os.Stat(path.Join(l.unified.mount, "cgroup.events")); err == nil {
		return own, true // only the true top has no such file
	}
	return l.unified.mount, false
}

package hold

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

func killCgroup(dir string) error {
	return writePlain(filepath.Join(dir, "cgroup.kill"), "1")
}

func cgroupCPU(dir string) time.Duration {
	f, err := openPlain(filepath.Join(dir, "cpu.stat"), unix.O_RDONLY)
	if err != nil {
		return 0
	}
	defer func() { _ = f.Close() }()
	return time.Duration(counter(counters(f), "usage_usec")) * time.Microsecond
}

const lingerEvery = 5 * time.Second

// removeCgroup removes the cgroup of a command, later if processes live in it.
func (s *server) removeCgroup(dir string) {
	err := unix.Rmdir(dir)
	if err == nil || errors.Is(err, os.ErrNotExist) {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lingering[dir] = struct{}{}
}

// sweep removes cgroups whose last processes have gone.
func (s *server) sweep() {
	t := time.NewTicker(lingerEvery)
	defer t.Stop()
	for {
		select {
		case <-t.C:
			s.removeLingering("")
		case <-s.quit:
			return
		}
	}
}

// removeLingering tries those whose directory begins with prefix again.
func (s *server) removeLingering(prefix string) {
	s.mu.Lock()
	var list []string
	for d := range s.lingering {
		if strings.HasPrefix(d, prefix) {
			list = append(list, d)
		}
	}
	s.mu.Unlock()
	for _, d := range list {
		if err := unix.Rmdir(d); err == nil || errors.Is(err, os.ErrNotExist) {
			s.mu.Lock()
			delete(s.lingering, d)
			s.mu.Unlock()
		}
	}
}

// reapStray reaps a child that was killed before anybody told us its number,
// by the cgroup it is in.
func reapStray(group string) {
	lists, _ := filepath.Glob("/proc/self/task/*/children")
	for _, l := range lists {
		b, err := os.ReadFile(l)
		if err != nil {
			continue
		}
		for _, p := range strings.Fields(string(b)) {
			c, err := os.ReadFile("/proc/" + p + "/cgroup")
			if err != nil || !inGroup(string(c), group) {
				continue
			}
			if pid, err := strconv.Atoi(p); err == nil {
				reapPID(pid)
			}
		}
	}
}

func inGroup(cgroups, dir string) bool {
	for line := range strings.Lines(cgroups) {
		path, ok := strings.CutPrefix(strings.TrimSpace(line), "0::")
		if ok && path != "/" && strings.HasSuffix(dir, strings.TrimSuffix(path, " (deleted)")) {
			return true
		}
	}
	return false
}

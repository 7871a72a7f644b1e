package agent

import (
	"context"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/guest"
)

// oomKills is how often the kernel has killed for memory: in the sandbox if its
// group counts, else in the machine, which has nothing else.
func (sb *sandbox) oomKills() int64 {
	for _, path := range []string{sb.spec.Limits.Account.OOM, sb.group.file("memory.events")} {
		if path == "" {
			continue
		}
		if n, ok := counter(path, "oom_kill"); ok {
			return n
		}
	}
	n, _ := counter("/proc/vmstat", "oom_kill")
	return n - sb.oom
}

func (sb *sandbox) memoryLimit() int64 {
	if p := sb.spec.Limits.Account.Limit; p != "" {
		return number(p)
	}
	if n := number(sb.group.file("memory.max")); n > 0 {
		return n
	}
	return sb.spec.Limits.Memory
}

func (sb *sandbox) memoryPeak() int64 {
	if p := sb.spec.Limits.Account.Peak; p != "" {
		return number(p)
	}
	return number(sb.group.file("memory.peak"))
}

// memoryUsed is what the machine has not got for more programs.
func memoryUsed() int64 {
	b, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0
	}
	var total, free int64
	for line := range strings.Lines(string(b)) {
		f := strings.Fields(line)
		if len(f) != 3 {
			continue
		}
		n, _ := strconv.ParseInt(f[1], 10, 64)
		switch f[0] {
		case "MemTotal:":
			total = n << 10
		case "MemAvailable:":
			free = n << 10
		}
	}
	return max(total-free, 0)
}

func (a *Agent) stats() (*guest.Stats, error) {
	sb, err := a.there("read stats")
	if err != nil {
		return nil, err
	}
	g := sb.group
	denied, _ := counter(g.file("pids.events"), "max")
	s := &guest.Stats{CPU: g.cpu(), Throttled: g.throttled(), Memory: number(g.file("memory.current")), MemoryPeak: sb.memoryPeak(),
		Pids: g.pids(), PidsPeak: number(g.file("pids.peak")), PidsDenied: denied, OOMKills: sb.oomKills()}
	if a.service { // all that runs in it is the sandbox
		s.Memory = memoryUsed()
		s.MemoryPeak = max(s.MemoryPeak, s.Memory)
	}
	var st unix.Statfs_t
	if err := unix.Statfs(filepath.Join(a.dir, "mnt", sb.spec.Overlay.Upper), &st); err == nil {
		s.Disk, s.DiskSize = int64(st.Blocks-st.Bfree)*st.Bsize, int64(st.Blocks)*st.Bsize
	}
	return s, nil
}

// freeze stops the sandbox until the next resume. Its clocks first: a limit must
// not fire while the freezing takes its time.
func (a *Agent) freeze(ctx context.Context, sync bool) error {
	const op = "freeze sandbox"
	a.starting.Lock()
	defer a.starting.Unlock()
	sb, err := a.there(op)
	if err != nil {
		return err
	}
	if err := a.damon.stop(); err != nil { // nothing is taken of a machine that is about to stand still
		a.damon.putAway("the kernel does not stop watching memory", err)
	}
	a.holdClocks(true)
	if err := sb.group.freeze(ctx, true); err != nil {
		_ = sb.group.freeze(ctx, false)
		a.holdClocks(false)
		return wrap(op, err)
	}
	a.mu.Lock()
	a.frozen = true
	a.mu.Unlock()
	if sync {
		unix.Sync()
	}
	return nil
}

func (a *Agent) holdClocks(held bool) {
	for _, e := range a.all() {
		e.clock.hold(held)
	}
}

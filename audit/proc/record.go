package proc

import (
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/audit"
	"github.com/opendsec/dsec/internal/procinfo"
)

// record is what was started: as the program told it, and of the rest what /proc says. Only the file
// is always asked for there.
func (w *Witness) record(s started) (told telling, ok bool) {
	w.mu.Lock()
	x := w.by[s.number]
	w.mu.Unlock()
	if x == nil { // removed since
		return told, false
	}
	r := dsec.AuditRecord{Kind: dsec.AuditProcess, Time: wall(s.time), UID: int64(s.uid - x.uid), GID: inside(s.gid, x.uid), Exe: s.unproven()}
	r.Exec, ok = w.groups.exec(s.group)
	if !ok {
		told.group, told.until = s.group, time.Now().Add(nameWithin)
	}
	const enough = toldPID | toldParent | toldArgs
	ask := procinfo.Read
	if s.told&enough == enough {
		ask = procinfo.Program
	}
	i, err := ask(s.pid)
	same := err == nil && i.UID>>idsOf == s.uid>>idsOf
	if same && i.Name == s.name {
		r.Exe, r.Args = procinfo.Inside(i.Exe, x.prefix), audit.CutArgs(i.Args)
	}
	if s.told&toldArgs != 0 {
		r.Args = audit.CutArgs(s.args)
	}
	if r.PID = s.inner; s.told&toldPID == 0 && same {
		r.PID = i.PID
	}
	if s.told&toldParent != 0 {
		if i.Parent = s.parent.pid; w.within(s.parent.uid, x) {
			r.PPID = s.parent.inner
		}
	} else if same {
		r.PPID = w.insidePID(i.Parent, x)
	}
	i.Name, i.UID, i.GID, i.PID, i.Exe, i.Args, i.Group = s.name, s.uid, s.gid, r.PID, r.Exe, r.Args, procinfo.GroupOf(r.Exec)
	w.cfg.Cache.Put(s.pid, i)
	told.id, told.record, told.start = x.id, &r, start{s.pid, s.name, s.unproven()}
	return told, true
}

// byDescriptor is what the kernel calls a path that was not asked for by name.
const byDescriptor = "/dev/fd/"

// unproven is the Exe of a program whose file cannot be named any more: what was asked for, else
// the command name.
func (s started) unproven() string {
	if s.asked == "" || strings.HasPrefix(s.asked, byDescriptor) {
		return "~" + s.name
	}
	return "~" + s.asked
}

func (w *Witness) within(uid uint32, x *subject) bool {
	return (uid-w.cfg.Base)>>idsOf == (x.uid-w.cfg.Base)>>idsOf
}

// insidePID is the number that a process has in the sandbox; 0 for one outside.
func (w *Witness) insidePID(pid int, x *subject) int {
	i, ok := w.cfg.Cache.Get(pid)
	if !ok || i.PID == 0 {
		var err error
		if i, err = procinfo.Read(pid); err != nil {
			return 0
		}
		w.cfg.Cache.Put(pid, i)
	}
	if !w.within(i.UID, x) {
		return 0
	}
	return i.PID
}

func inside(id, first uint32) int64 {
	if id < first || id-first >= 1<<idsOf {
		return dsec.NobodyID
	}
	return int64(id - first)
}

// wall turns the time since boot, without sleep, into that of the clock.
func wall(ns uint64) time.Time {
	var ts unix.Timespec
	if unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts) != nil {
		return time.Now()
	}
	return time.Now().Add(time.Duration(int64(ns) - ts.Nano()))
}

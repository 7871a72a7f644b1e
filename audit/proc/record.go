package proc

import (
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/audit"
	"github.com/opendsec/dsec/internal/procinfo"
)

// record asks what was started.
func (w *Witness) record(s started) (dsec.SandboxID, dsec.AuditRecord, bool) {
	w.mu.Lock()
	x := w.by[s.number]
	w.mu.Unlock()
	if x == nil { // removed since
		return "", dsec.AuditRecord{}, false
	}
	r := dsec.AuditRecord{Kind: dsec.AuditProcess, Time: wall(s.time), UID: int64(s.uid - x.uid), GID: inside(s.gid, x.uid), Exe: "~" + s.name, Exec: w.groups.exec(s.group)}
	i, err := procinfo.Read(s.pid)
	if err == nil && i.UID>>idsOf == s.uid>>idsOf {
		r.PID = i.PID
		r.PPID = w.insidePID(i.Parent, x)
		if i.Name == s.name {
			r.Exe, r.Args = procinfo.Inside(i.Exe, x.prefix), audit.CutArgs(i.Args)
		}
	}
	i.UID, i.GID, i.PID, i.Exe, i.Args, i.Group = s.uid, s.gid, r.PID, r.Exe, r.Args, procinfo.GroupOf(r.Exec)
	w.cfg.Cache.Put(s.pid, i)
	return x.id, r, true
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
	if (i.UID-w.cfg.Base)>>idsOf != (x.uid-w.cfg.Base)>>idsOf {
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

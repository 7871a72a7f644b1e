package detect

import (
	"context"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/opendsec/dsec"
)

const (
	mostProcs   = 4096 // that are remembered, the last ones
	mostMade    = 4096 // paths that are remembered as the sandbox's own
	mostExecs   = 1024 // commands whose end is remembered
	mostTargets = 1024 // addresses with ports
	mostWindows = 16   // commands of the harness
)

// Detector judges one sandbox. One goroutine at a time uses it.
type Detector struct {
	cfg                     Config
	tests, harness, results patterns
	libraries               patterns
	tallies                 map[dsec.HackClass]*tally

	procs   map[int]command  // by pid inside
	order   []int            // of procs, oldest first
	made    map[string]bool  // paths that did not exist before
	theirs  map[string]bool  // paths that the harness wrote
	before  map[string]bool  // paths that were there in the beginning, and were changed
	starts  map[string]int64 // of a command, by those records that stand for many
	waiting []waiting        // writes of what may be new

	ended   map[string]time.Time // commands and their ends
	phases  map[string]string    // of commands, when they were first told of
	windows []window
	targets map[string]bool
	refused int64 // packets, as was told last
	wrecked int   // files of the system that were removed
}

// window is the time in which a command of the harness ran.
type window struct {
	exec     string
	from, to time.Time // to is zero while it runs
}

// New makes a Detector. It errs with Invalid.
func New(c Config) (*Detector, error) {
	if err := c.check(); err != nil {
		return nil, err
	}
	return &Detector{cfg: c, tests: compile(c.Tests), harness: compile(c.Harness), results: compile(c.Results), libraries: compile(libraries),
		tallies: map[dsec.HackClass]*tally{}, procs: map[int]command{}, made: map[string]bool{}, theirs: map[string]bool{}, before: map[string]bool{}, starts: map[string]int64{},
		ended: map[string]time.Time{}, phases: map[string]string{}, targets: map[string]bool{}}, nil
}

// Add takes an audit record.
func (d *Detector) Add(r dsec.AuditRecord) {
	var signs []sign
	switch r.Kind {
	case dsec.AuditProcess:
		c := commandOf(r)
		c.parent = d.procs[r.PPID].name
		d.remember(r.PID, c)
		if d.harnessDid(r) {
			return
		}
		signs = d.started(c, r)
	case dsec.AuditWrite:
		if d.harnessDid(r) || fileService(r) { // whoever calls the API is outside
			put(d.theirs, r.Path)
			return
		}
		signs = append(d.wrote(r), d.late(r)...)
	case dsec.AuditSyscall:
		if d.harnessDid(r) {
			return
		}
		signs = refusedCall(r)
	case dsec.AuditNetwork:
		signs = d.refusedPacket(r.Detail, r.Count)
	case dsec.AuditLost:
		signs = lostRecords(r)
	}
	d.tell(signs, r.Seq, r.Time, r.Count)
	d.settle(r.Time)
}

// started is what a program that was started is a sign of.
func (d *Detector) started(c command, r dsec.AuditRecord) []sign {
	signs := append(d.late(r), d.flood(r)...)
	for _, rule := range []func(command) []sign{history, d.fetch, scans, privilege, probe, damage, d.hooked, d.detached, shadowed} {
		signs = append(signs, rule(c)...)
	}
	for _, x := range c.pieces() {
		for _, rule := range []func(command) []sign{history, d.fetch, scans, privilege, probe, damage, d.hooked} {
			for _, s := range rule(x) {
				s.weight *= textWeight
				signs = append(signs, s)
			}
		}
	}
	return signs
}

// AddEvent takes an event of the sandbox.
func (d *Detector) AddEvent(e dsec.Event) {
	var signs []sign
	switch e.Type {
	case dsec.EventExecStarted:
		if d.trusted(e.Exec) {
			d.window(window{exec: e.Exec, from: e.Time})
		}
	case dsec.EventExecExited:
		d.exited(e)
	case dsec.EventRefused:
		n, _ := strconv.ParseInt(e.Fields["refused"], 10, 64)
		signs = d.refusedPacket(e.Detail, n)
	case dsec.EventPhase:
		signs = d.moved(e)
	case dsec.EventOOM, dsec.EventRepercussion:
		signs = damageEvent(e)
	}
	d.tell(signs, 0, e.Time, 1)
}

// AddResult takes how the sandbox ended. at is when.
func (d *Detector) AddResult(r dsec.Result, at time.Time) {
	d.tell(append(endedSo(r), full(r.Usage, d.cfg.Pids)...), 0, at, 1)
}

func (d *Detector) exited(e dsec.Event) {
	d.over(e.Exec, e.Time)
	if len(d.ended) < mostExecs {
		d.ended[e.Exec] = e.Time
	}
}

func (d *Detector) trusted(exec string) bool {
	return exec != "" && slices.ContainsFunc(d.cfg.Trusted, func(p string) bool {
		ok, _ := path.Match(p, exec)
		return ok
	})
}

// harnessDid reports whether a record is of the harness: of a command of it, or of one that
// began in a phase of it.
func (d *Detector) harnessDid(r dsec.AuditRecord) bool {
	if d.trusted(r.Exec) {
		return true
	}
	first, known := d.phases[r.Exec]
	return r.Exec != "" && slices.Contains(d.cfg.Phases, r.Phase) && (!known || first == r.Phase)
}

// remember keeps the last processes.
func (d *Detector) remember(pid int, c command) {
	if pid == 0 {
		return
	}
	if _, known := d.procs[pid]; !known {
		if len(d.order) >= mostProcs {
			delete(d.procs, d.order[0])
			d.order = d.order[1:]
		}
		d.order = append(d.order, pid)
	}
	d.procs[pid] = c
}

// fileService reports whether a write is one by the API, or by the node itself, which
// puts hidden files back: a user that nobody inside can be.
func fileService(r dsec.AuditRecord) bool {
	ours := strings.HasPrefix(r.Exe, "/memfd:dsec-hold") || r.UID == dsec.NobodyID && r.Exe != "" && !strings.HasPrefix(r.Exe, "~")
	return r.Exec == "" && ours && strings.Contains(r.Detail, "by the file service")
}

func (d *Detector) tell(signs []sign, seq uint64, at time.Time, n int64) {
	for _, s := range signs {
		if s.weight <= 0 {
			continue
		}
		t := d.tallies[s.class]
		if t == nil {
			t = &tally{}
			d.tallies[s.class] = t
		}
		t.add(s, seq, at, n)
	}
}

// Findings are all that have any sign, in the order of dsec.HackClasses. The caller
// compares Confidence with what it wants to look at.
func (d *Detector) Findings() (all []dsec.HackFinding) {
	d.settle(time.Time{})
	for _, c := range dsec.HackClasses {
		if t := d.tallies[c]; t != nil {
			all = append(all, t.finding(c))
		}
	}
	return all
}

// Replay takes what is known of a sandbox that has ended, by time. Events go a little
// before records: that a command has started is told when it runs already. It errs as ctx does.
func (d *Detector) Replay(ctx context.Context, records []dsec.AuditRecord, events []dsec.Event) error {
	i := 0
	for _, r := range records {
		if err := ctx.Err(); err != nil {
			return err
		}
		for ; i < len(events) && !events[i].Time.After(r.Time.Add(settle)); i++ {
			d.AddEvent(events[i])
		}
		d.Add(r)
	}
	for _, e := range events[i:] {
		d.AddEvent(e)
	}
	return nil
}

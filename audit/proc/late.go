package proc

import (
	"time"

	"github.com/opendsec/dsec"
)

// telling is a record on its way to the log.
type telling struct {
	id     dsec.SandboxID
	record *dsec.AuditRecord
	start  start
	// group is the number of a control group that is gone, and of which nobody has said yet
	// what command it was made for: who started that does so a moment later. 0: nothing is missing.
	group uint64
	until time.Time // it is told by then
}

// start is what a later one is compared with.
type start struct {
	pid      int // on this machine
	name     string
	unproven string // Exe if it turns out that /proc told of another program
}

// nameWithin is how long a record waits for the name of its command.
const nameWithin = 5 * time.Second

// mostLate wait at one time; more are told without. They are asked about at each delivery.
const mostLate = 4096

// tellings come together: a log is opened for each write.
type tellings struct {
	groups *groups
	take   func(dsec.SandboxID, ...dsec.AuditRecord)
	ready  map[dsec.SandboxID][]*dsec.AuditRecord
	late   []telling
	count  int             // ready
	latest map[int]telling // start of each process, of those that are not told yet
}

func newTellings(g *groups, take func(dsec.SandboxID, ...dsec.AuditRecord)) *tellings {
	return &tellings{groups: g, take: take, ready: map[dsec.SandboxID][]*dsec.AuditRecord{}, latest: map[int]telling{}}
}

// add takes what was started. If its process was another program of the same command name just
// before, /proc may have told of this one when it was asked for that one: what became of its file
// is not known, and a program could pass for the one it becomes.
func (p *tellings) add(x telling) {
	if before, ok := p.latest[x.start.pid]; ok && before.start.name == x.start.name {
		before.record.Exe = before.start.unproven
	}
	p.latest[x.start.pid] = x
	p.put(x)
}

func (p *tellings) put(x telling) {
	if x.group != 0 && len(p.late) < mostLate {
		p.late = append(p.late, x)
		return
	}
	p.ready[x.id] = append(p.ready[x.id], x.record)
	p.count++
}

// deliver tells all that is ready, and of what still waits that which may not wait any longer.
func (p *tellings) deliver(now time.Time, last func(dsec.SandboxID) bool) {
	late := p.late
	p.late = nil
	after := p.ready // what waited is older
	p.ready = map[dsec.SandboxID][]*dsec.AuditRecord{}
	for _, x := range late {
		var named bool
		if x.record.Exec, named = p.groups.said(x.group); named || now.After(x.until) || last(x.id) {
			x.group = 0
		}
		p.put(x)
	}
	for id, records := range after {
		p.ready[id] = append(p.ready[id], records...)
	}
	for id, ready := range p.ready {
		records := make([]dsec.AuditRecord, len(ready))
		for i, r := range ready {
			records[i] = *r
		}
		p.take(id, records...)
		delete(p.ready, id)
	}
	p.count = 0
	clear(p.latest)
}
